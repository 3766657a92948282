"""Llama 3 targets (LlamaForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from graphspec.checkpoints import Checkpoint

from ..blocks.decoder import DecoderConfig
from ..target import DecoderTarget
from ..weights import load_parameters
from .weights import HEAD, is_derived, sources


def load_target(checkpoint: Checkpoint, *, capacity: int, qk_norm: bool = False) -> DecoderTarget:
    """The target with its weights, in float32, with rotary tables for `capacity` positions.

    Raises CheckpointError if its tensors are not exactly those of its config.
    """
    stated = DecoderConfig.read(checkpoint.config, qk_norm=qk_norm)
    # A head beside a config that calls it tied is a copy of the embedding, or else holds, as in transformers.
    config = replace(stated, tied=stated.tied and HEAD not in checkpoint.tensors)
    target = DecoderTarget(config, capacity=capacity)
    load_parameters(target, checkpoint, sources(config), ignored=is_derived)
    if stated.tied:
        target.tie_equal_head()
    return target
