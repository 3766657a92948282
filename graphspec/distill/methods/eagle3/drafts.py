"""A new EAGLE-3 head for a target, and its checkpoint in the layout that other servers read as well."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.drafters.eagle3_loading import sources
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


def draft_config(target: Mapping[str, Any], shape: DraftShape, draft_vocabulary: int) -> dict[str, Any]:
    """config.json of a one-layer head. Raises UnsupportedError for a target too shallow to be tapped."""
    sizes = DecoderConfig.read(target)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layers_config(target, shape, 1),
        "draft_vocab_size": draft_vocabulary,
        "target_hidden_size": sizes.hidden,
        "eagle_aux_hidden_state_layer_ids": list(taps(sizes.layers, reader="EAGLE-3")),
        "torch_dtype": "float16",
    }


def new_drafter(target: DecoderTarget, config: Mapping[str, Any], kept: Tensor, *, seed: int) -> Eagle3Drafter:
    """A head that begins as a copy of the target's end: its last layer where the sizes agree, its norm, and the
    rows of its head for the tokens i64[Vd] `kept`. The rest is small and random."""
    drafter = Eagle3Drafter(
        DecoderConfig.read(config),
        Ends(head_rows=len(kept), pruned=True),
        taps=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        target_hidden=target.config.hidden,
        num_draft_tokens=1,
        capacity=target.capacity,
    )
    drafter.offsets = draft_to_target(kept)
    fill_randomly(drafter, torch.Generator().manual_seed(seed))
    _copy_end(target, drafter, kept)
    return drafter


def save_draft(folder: Path, drafter: Eagle3Drafter, config: Mapping[str, Any]) -> None:
    """config.json and model.safetensors in float16, under the names of SafeAILab's heads."""
    tensors = {_published(name): tensor for name, tensor in stored_tensors(drafter, sources(drafter)).items()}
    write_draft(folder, tensors | vocabulary_tensors(drafter), config)


def _published(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1)


def _copy_end(target: DecoderTarget, drafter: Eagle3Drafter, kept: Tensor) -> None:
    last = list(target.layers)[-1]
    with torch.no_grad():
        copy_ends(target, drafter, kept)
        drafter.first.mlp_norm.weight.copy_(last.mlp_norm.weight)
        if drafter.config.intermediate == target.config.intermediate:
            drafter.first.mlp.gate_up.weight.copy_(last.mlp.gate_up.weight)
            drafter.first.mlp.down.weight.copy_(last.mlp.down.weight)
        if same_heads(drafter.first.attention, last.attention):
            assert last.input_norm is not None
            drafter.first.hidden_norm.weight.copy_(last.input_norm.weight)
            drafter.first.attention.qkv.weight[:, target.config.hidden :] = last.attention.qkv.weight
            drafter.first.attention.output.weight.copy_(last.attention.output.weight)
