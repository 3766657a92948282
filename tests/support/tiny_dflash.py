"""Tiny DFlash drafts in the layouts of z-lab and of speculators, and transformers' module of the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from reference import TargetStates
from tiny import _DRAFT_CONFIG, HIDDEN, PRUNED, VOCABULARY, _norm, _random, layer_tensors, save_draft
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

MASK = VOCABULARY - 1
_RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def dflash_tensors(seed: int = 3, *, num_taps: int = 2, layers: int = 2, pruned: bool = False) -> dict[str, Tensor]:
    """A draft's tensors; pruned: its own head of 32 of the 128 tokens, with d2t and t2d."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "fc.weight": _random(generator, HIDDEN, num_taps * HIDDEN, std=0.1),
        "hidden_norm.weight": _norm(generator, HIDDEN),
        "norm.weight": _norm(generator, HIDDEN),
    }
    for layer in range(layers):
        tensors |= layer_tensors(generator, f"layers.{layer}", qk_norm=True)
    if pruned:
        kept = torch.randperm(VOCABULARY, generator=generator)[:PRUNED].sort().values
        tensors["lm_head.weight"] = _random(generator, PRUNED, HIDDEN)
        tensors["d2t"] = kept - torch.arange(PRUNED)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def save_dflash(path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """As z-lab publishes them: block_size beside a dflash_config that names the layers left."""
    config = {
        **_DRAFT_CONFIG,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "block_size": 4,
        "num_target_layers": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5]},
        **changes,
    }
    return save_draft(path, config, tensors if tensors is not None else dflash_tensors())


def save_dflash_speculators(
    path: Path, tensors: dict[str, Tensor] | None = None, *, taps: tuple[int, ...] = (2, 6), **changes: Any
) -> Path:
    """As speculators publishes them: a nested layer config, taps as the layers entered, a head of its own."""
    layer_config = {**_DRAFT_CONFIG, "model_type": "qwen3", "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "draft_vocab_size": PRUNED,
        "block_size": 4,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": list(taps),
        "sample_from_anchor": False,
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }
    return save_draft(path, config, tensors or dflash_tensors(num_taps=len(taps), pruned=True))


def reference_module(tensors: dict[str, Tensor], *, num_taps: int, layers: int, theta: float = 10000.0) -> Any:
    """transformers' own DFlash module, in float64 (checkpoints.md §6.3)."""
    # Their dataclass transform and their untyped methods are more than mypy sees through.
    make_config: Any = MuseGlimmerAssistantConfig
    config = make_config(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        layer_types=["full_attention"] * layers,
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=list(range(num_taps)),
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    module: Any = MuseGlimmerAssistantModel(config).double()
    module.eval()
    weights = {_RENAMED.get(name, name): tensor.double() for name, tensor in tensors.items()}
    stored = {name: weights.pop(name) for name in module.state_dict()}
    assert weights.keys() <= {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}
    module.load_state_dict(stored)
    return module


def reference_logits(
    module: Any,
    tokens: Sequence[int],
    states: TargetStates,
    *,
    taps: Sequence[int],
    embedding: Tensor,
    head: Tensor,
    count: int,
) -> Tensor:
    """f64[count, V]: what the block after x_0 … x_n says, of which the target has run all but the last (§4.6)."""
    n = len(tokens) - 1
    context = torch.cat([states.entering[tap][:n] for tap in taps], dim=-1).unsqueeze(0)
    block = embedding[[tokens[-1], *[MASK] * count]].unsqueeze(0)
    with torch.no_grad():
        out = module(noise_embeds=block, context_hidden_states=context).last_hidden_state
    logits: Tensor = out[0, 1:] @ head.T
    return logits
