"""Tiny random checkpoints in the layouts of real ones (shared/reference: hidden 64, vocabulary 128).

Weights are drawn wide enough that argmax is not degenerate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 128
HIDDEN = 64
PRUNED = 32
"""Tokens in the EAGLE-3 heads' vocabulary."""
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_llama(path: Path, *, seed: int = 0, layers: int = 8, **changes: Any) -> Path:
    """A LlamaForCausalLM; `changes` go into its config."""
    values = {**_SIZES, "num_hidden_layers": layers, "head_dim": 16, "rms_norm_eps": 1e-5, "initializer_range": 0.2}
    config = LlamaConfig(**{**values, "tie_word_embeddings": False, **changes})
    return _save(path, LlamaForCausalLM, config, seed)


def save_qwen3(path: Path, *, seed: int = 0, layers: int = 8, **changes: Any) -> Path:
    """A Qwen3ForCausalLM, with a head dimension that is not hidden / heads."""
    values = {**_SIZES, "num_hidden_layers": layers, "head_dim": 32, "rms_norm_eps": 1e-6, "initializer_range": 0.2}
    config = Qwen3Config(**{**values, "tie_word_embeddings": False, **changes})
    return _save(path, Qwen3ForCausalLM, config, seed)


def _save(path: Path, kind: Any, config: Any, seed: int) -> Path:
    torch.manual_seed(seed)
    model = kind(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    save_tokenizer(path, config.vocab_size)
    return path


def save_tokenizer(path: Path, vocabulary: int = VOCABULARY) -> None:
    """Token i is the i-th printable character of a fixed list, so that every id decodes to something."""
    symbols = [chr(0x21 + i) for i in range(94)] + [chr(0xC0 + i) for i in range(vocabulary)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({symbol: i for i, symbol in enumerate(symbols[:vocabulary])}, unk_token="!")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))


def layer_tensors(
    generator: torch.Generator,
    prefix: str,
    *,
    inputs: int = HIDDEN,
    hidden: int = HIDDEN,
    input_norm: bool = True,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> dict[str, Tensor]:
    """One decoder layer of 4 query and 2 key heads of 16; `inputs`: what its attention reads."""
    tensors = {
        f"{prefix}.self_attn.q_proj.weight": _random(generator, 64, inputs),
        f"{prefix}.self_attn.k_proj.weight": _random(generator, 32, inputs),
        f"{prefix}.self_attn.v_proj.weight": _random(generator, 32, inputs),
        f"{prefix}.self_attn.o_proj.weight": _random(generator, hidden, 64),
        f"{prefix}.mlp.gate_proj.weight": _random(generator, 128, hidden),
        f"{prefix}.mlp.up_proj.weight": _random(generator, 128, hidden),
        f"{prefix}.mlp.down_proj.weight": _random(generator, hidden, 128),
        f"{prefix}.post_attention_layernorm.weight": _norm(generator, hidden),
    }
    if input_norm:
        tensors[f"{prefix}.input_layernorm.weight"] = _norm(generator, hidden)
    if qkv_bias:
        for name, rows in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"{prefix}.self_attn.{name}_proj.bias"] = _random(generator, rows)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = _norm(generator, 16)
    return tensors


def unsaturated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries and keys so small that no softmax saturates: one that does amplifies rounding a thousandfold."""
    return {name: x * 0.3 if name.endswith(("q_proj.weight", "k_proj.weight")) else x for name, x in tensors.items()}


def _random(generator: torch.Generator, *shape: int, std: float = 0.2) -> Tensor:
    return torch.randn(shape, generator=generator) * std


def _norm(generator: torch.Generator, width: int) -> Tensor:
    return torch.rand(width, generator=generator) + 0.5


_DRAFT_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}


def eagle_tensors(
    seed: int = 1, *, fc_bias: bool = False, qkv_bias: bool = False, layers: int = 1
) -> dict[str, Tensor]:
    """An EAGLE-1/2 head's tensors: no norm before the first attention."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"fc.weight": _random(generator, HIDDEN, 2 * HIDDEN)}
    for layer in range(layers):
        tensors |= layer_tensors(generator, f"layers.{layer}", input_norm=layer > 0, qkv_bias=qkv_bias)
    if fc_bias:
        tensors["fc.bias"] = _random(generator, HIDDEN)
    return tensors


def save_eagle(path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """An EAGLE-1/2 head as published (LlamaForCausalLM), or with other tensors and config keys."""
    config = {**_DRAFT_CONFIG, "architectures": ["LlamaForCausalLM"], "bias": False, **changes}
    return save_draft(path, config, tensors if tensors is not None else eagle_tensors())


def eagle3_tensors(
    seed: int = 2,
    *,
    num_taps: int = 3,
    prefix: str = "midlayer",
    pruned: bool = True,
    hidden: int = HIDDEN,
    layers: int = 1,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> dict[str, Tensor]:
    """An EAGLE-3 head's tensors; pruned: 32 of the 128 tokens, with d2t and t2d."""
    generator = torch.Generator().manual_seed(seed)
    rows = PRUNED if pruned else VOCABULARY
    tensors = {
        "fc.weight": _random(generator, hidden, num_taps * HIDDEN, std=0.1),
        f"{prefix}.hidden_norm.weight": _norm(generator, hidden),
        "norm.weight": _norm(generator, hidden),
        "lm_head.weight": _random(generator, rows, hidden),
    }
    for layer in range(layers):
        tensors |= layer_tensors(
            generator,
            prefix if layer == 0 else f"layers.{layer}",
            inputs=hidden if layer else 2 * hidden,
            hidden=hidden,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
        )
    if pruned:
        kept = torch.randperm(VOCABULARY, generator=generator)[:PRUNED].sort().values
        tensors["d2t"] = kept - torch.arange(PRUNED)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def save_eagle3(path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """An EAGLE-3 head as published (LlamaForCausalLM + draft_vocab_size), or with other tensors and config keys."""
    config = {**_DRAFT_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": PRUNED, **changes}
    return save_draft(path, config, tensors if tensors is not None else eagle3_tensors())


def save_eagle3_speculators(
    path: Path, tensors: dict[str, Tensor] | None = None, *, taps: tuple[int, ...] = (2, 4, 5), **changes: Any
) -> Path:
    """The speculators layout: nested config, layers.0 names, taps as the layers entered."""
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": PRUNED,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "transformer_layer_config": {**_DRAFT_CONFIG},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }
    return save_draft(path, config, tensors or eagle3_tensors(num_taps=len(taps), prefix="layers.0"))


def save_draft(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
