"""A new EAGLE-1 head for a target, and its checkpoint in the layout of SafeAILab's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.drafters.eagle import EagleDrafter, sources
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.drafts import fill_randomly, layers_config, stored_tensors, write_draft
from graphspec.distill.recipe import DraftShape


def draft_config(target: Mapping[str, Any], shape: DraftShape) -> dict[str, Any]:
    """config.json of a one-layer head."""
    return {
        # As published; the tensors say what it is (checkpoints.md §4.1). SGLang wants LlamaForCausalLMEagle here.
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layers_config(target, shape, 1),
        "bias": False,
        "torch_dtype": "float16",
    }


def new_drafter(target: DecoderTarget, config: Mapping[str, Any], kept: Tensor, *, seed: int) -> EagleDrafter:
    """A head that begins by handing on the target's state as the next one; the rest is small and random."""
    assert len(kept) == target.config.vocabulary, "the target's head says every token"
    drafter = EagleDrafter(
        DecoderConfig.read(config),
        capacity=target.capacity,
        num_draft_tokens=1,
        fc_bias=False,
        first_input_norm=False,
        last_norm=False,
    )
    fill_randomly(drafter, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        drafter.fc.weight[:, target.config.hidden :].add_(torch.eye(target.config.hidden))
    return drafter


def save_draft(folder: Path, drafter: EagleDrafter, config: Mapping[str, Any]) -> None:
    """config.json and model.safetensors in float16; embedding and head are the target's."""
    write_draft(folder, stored_tensors(drafter, sources(drafter)), config)
