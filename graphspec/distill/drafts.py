"""A new EAGLE-3 head for a target, and its checkpoint in the layout that other servers read as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from graphspec.architectures.blocks.decoder import Attention, DecoderConfig, DecoderLayer
from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.drafters.eagle3_loading import sources
from graphspec.architectures.target import DecoderTarget
from graphspec.errors import UnsupportedError

from .vocabulary import draft_to_target, target_to_draft

_CARRIED = ("rope_theta", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id")
"""Config keys that a head has from its target; not the scaling of its rope (checkpoints.md §4.2)."""
_FEWEST_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of a head that its target does not decide; None: the target's."""

    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


def draft_config(target: Mapping[str, Any], shape: DraftShape, draft_vocabulary: int) -> dict[str, Any]:
    """config.json of a one-layer head. Raises UnsupportedError for a target too shallow to be tapped."""
    sizes = DecoderConfig.read(target)
    if sizes.layers < _FEWEST_LAYERS:
        raise UnsupportedError(
            f"EAGLE-3 reads three layers, and a target of {sizes.layers} has too few between its ends"
        )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": shape.intermediate or sizes.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads or sizes.heads,
        "num_key_value_heads": shape.kv_heads or sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": sizes.vocabulary,
        "draft_vocab_size": draft_vocabulary,
        "target_hidden_size": sizes.hidden,
        "eagle_aux_hidden_state_layer_ids": list(taps(sizes.layers)),
        "torch_dtype": "float16",
        **{key: target[key] for key in _CARRIED if target.get(key) is not None},
    }


def taps(layers: int) -> tuple[int, int, int]:
    """Layers whose input a head reads, as vLLM counts them. In a deep target those that every server takes when a
    config names none; they would meet in a shallow one."""
    usual = (2, layers // 2, layers - 3)
    return usual if usual[0] < usual[1] < usual[2] else (1, layers // 2, layers - 1)


def new_drafter(target: DecoderTarget, config: Mapping[str, Any], kept: Tensor, *, seed: int) -> Eagle3Drafter:
    """A head that begins as a copy of the target's end: its last layer where the sizes agree, its norm, and the
    rows of its head for the tokens i64[Vd] `kept`. The rest is small and random."""
    drafter = Eagle3Drafter(
        DecoderConfig.read(config),
        taps=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        target_hidden=target.config.hidden,
        draft_vocabulary=len(kept),
        own_embedding=False,
        pruned=True,
        tap_norms=False,
        norm_before_fc=False,
        norm_before_residual=False,
        norm_output=False,
        fc_bias=False,
        num_draft_tokens=1,
        capacity=target.capacity,
    )
    drafter.offsets = draft_to_target(kept)
    _fill_randomly(drafter, torch.Generator().manual_seed(seed))
    _copy_end(target, drafter, kept)
    return drafter


def save_draft(folder: Path, drafter: Eagle3Drafter, config: Mapping[str, Any]) -> None:
    """config.json and model.safetensors in float16, under the names of SafeAILab's heads."""
    parameters = dict(drafter.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, source in sources(drafter).items():
        value = parameters[name].detach()
        parts = torch.split(value, list(source.rows)) if source.rows else (value,)
        tensors |= {_published(stored): part.half() for stored, part in zip(source.names, parts, strict=True)}
    kept = torch.arange(len(drafter.offsets)) + drafter.offsets
    tensors["d2t"], tensors["t2d"] = drafter.offsets, target_to_draft(kept, drafter.config.vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    partial = weights.with_suffix(".partial")  # an older draft stays whole until this one is
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(weights)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _published(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1)


def _fill_randomly(drafter: Eagle3Drafter, generator: torch.Generator) -> None:
    """Norms at one, matrices at a scale that keeps what they read."""
    for name, parameter in list(drafter.named_parameters()):
        shape = tuple(parameter.shape)
        value = torch.ones(shape)
        if len(shape) == 2:
            value = torch.randn(shape, generator=generator) * (0.1 * shape[1] ** -0.5)
        owner, _, attribute = name.rpartition(".")
        setattr(drafter.get_submodule(owner), attribute, nn.Parameter(value))


def _copy_end(target: DecoderTarget, drafter: Eagle3Drafter, kept: Tensor) -> None:
    assert drafter.head is not None
    last = list(target.layers)[-1]
    with torch.no_grad():
        drafter.norm.weight.copy_(target.norm.weight)
        head = target.embedding.weight if target.head is None else target.head.weight
        drafter.head.weight.copy_(head[kept])
        drafter.fc.weight[:, -target.config.hidden :].add_(torch.eye(target.config.hidden))
        drafter.first.mlp_norm.weight.copy_(last.mlp_norm.weight)
        if drafter.config.intermediate == target.config.intermediate:
            drafter.first.mlp.gate_up.weight.copy_(last.mlp.gate_up.weight)
            drafter.first.mlp.down.weight.copy_(last.mlp.down.weight)
        if _same_heads(drafter.first.attention, last):
            assert last.input_norm is not None
            drafter.first.hidden_norm.weight.copy_(last.input_norm.weight)
            drafter.first.attention.qkv.weight[:, target.config.hidden :] = last.attention.qkv.weight
            drafter.first.attention.output.weight.copy_(last.attention.output.weight)


def _same_heads(attention: Attention, layer: DecoderLayer) -> bool:
    return (attention.heads, attention.kv_heads) == (layer.attention.heads, layer.attention.kv_heads)
