"""A new DFlash draft for a target, and its checkpoint in the layout of speculators, which other servers read too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.drafters.dflash import BlockLayer, DFlashDrafter
from graphspec.architectures.drafters.dflash_loading import sources
from graphspec.architectures.drafters.ends import Ends
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.drafts import (
    copy_ends,
    fill_randomly,
    layers_config,
    same_heads,
    stored_tensors,
    taps,
    vocabulary_tensors,
    write_draft,
)
from graphspec.distill.recipe import DraftShape
from graphspec.distill.vocabulary import draft_to_target
from graphspec.errors import ConfigError

DEFAULT_LAYERS = 2


def draft_config(target: Mapping[str, Any], shape: DraftShape, draft_vocabulary: int, depth: int) -> dict[str, Any]:
    """config.json of a draft whose blocks propose `depth` tokens.

    It reads the layers that EAGLE-3 heads read. The mask is the last token of the vocabulary: reserved in most, and a
    rare one in others, which can still be said and read. Raises UnsupportedError for a target too shallow to be
    tapped, ConfigError for more layers than it has.
    """
    sizes = DecoderConfig.read(target)
    layers = shape.layers or DEFAULT_LAYERS
    if layers > sizes.layers:
        raise ConfigError(f"--draft-layers {layers}: the target itself has {sizes.layers}")
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "draft_vocab_size": draft_vocabulary,
        "block_size": depth + 1,
        "mask_token_id": sizes.vocabulary - 1,
        "aux_hidden_state_layer_ids": list(taps(sizes.layers, reader="DFlash")),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformer_layer_config": {
            "model_type": "qwen3",
            **layers_config(target, shape, layers),
            "layer_types": ["full_attention"] * layers,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": target.get("_name_or_path"), "architectures": target.get("architectures")},
        },
    }


def new_drafter(target: DecoderTarget, config: Mapping[str, Any], kept: Tensor, *, seed: int) -> DFlashDrafter:
    """A draft that begins as a copy of the target's end: its last layers where the sizes agree, its norm, and the
    rows of its head for the tokens i64[Vd] `kept`. The rest is small and random."""
    drafter = DFlashDrafter(
        DecoderConfig.read(config["transformer_layer_config"], qk_norm=True),
        Ends(head_rows=len(kept), pruned=True),
        taps=tuple(config["aux_hidden_state_layer_ids"]),
        target_hidden=target.config.hidden,
        mask_token=config["mask_token_id"],
        num_draft_tokens=config["block_size"] - 1,
        capacity=target.capacity,
    )
    drafter.offsets = draft_to_target(kept)
    fill_randomly(drafter, torch.Generator().manual_seed(seed))
    _copy_end(target, drafter, kept)
    return drafter


def save_draft(folder: Path, drafter: DFlashDrafter, config: Mapping[str, Any]) -> None:
    """config.json and model.safetensors in float16, under the names of speculators."""
    write_draft(folder, stored_tensors(drafter, sources(drafter)) | vocabulary_tensors(drafter), config)


def _copy_end(target: DecoderTarget, drafter: DFlashDrafter, kept: Tensor) -> None:
    last = list(target.layers)[-drafter.config.layers :]
    with torch.no_grad():
        copy_ends(target, drafter, kept)
        for layer, model in zip(drafter.layers, last, strict=True):
            _copy_layer(layer, model)


def _copy_layer(layer: BlockLayer, model: Any) -> None:
    layer.mlp_norm.weight.copy_(model.mlp_norm.weight)
    if layer.mlp.down.weight.shape == model.mlp.down.weight.shape:
        layer.mlp.gate_up.weight.copy_(model.mlp.gate_up.weight)
        layer.mlp.down.weight.copy_(model.mlp.down.weight)
    if same_heads(layer.attention, model.attention):
        assert layer.input_norm is not None
        layer.input_norm.weight.copy_(model.input_norm.weight)
        layer.attention.qkv.weight.copy_(model.attention.qkv.weight)
        layer.attention.output.weight.copy_(model.attention.output.weight)
        if model.attention.q_norm is not None:
            assert layer.attention.q_norm is not None
            assert layer.attention.k_norm is not None
            layer.attention.q_norm.weight.copy_(model.attention.q_norm.weight)
            layer.attention.k_norm.weight.copy_(model.attention.k_norm.weight)
