"""Llama 3 targets (LlamaForCausalLM)."""

from __future__ import annotations

from graphspec.checkpoints import Checkpoint

from ..blocks.decoder import DecoderConfig
from ..target import DecoderTarget
from ..weights import load_parameters
from .weights import is_derived, sources


def load_target(checkpoint: Checkpoint, *, capacity: int, qk_norm: bool = False) -> DecoderTarget:
    """The target with its weights, in float32, with rotary tables for `capacity` positions.

    Raises CheckpointError if its tensors are not exactly those of its config.
    """
    config = DecoderConfig.read(checkpoint.config, qk_norm=qk_norm)
    target = DecoderTarget(config, capacity=capacity)

    def ignored(name: str) -> bool:
        return is_derived(name) or (config.tied and name == "lm_head.weight")

    load_parameters(target, checkpoint, sources(config), ignored=ignored)
    return target
