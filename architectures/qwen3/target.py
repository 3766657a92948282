"""Qwen3 targets (Qwen3ForCausalLM): Llama with norms on the heads of q and k before the rotary embedding."""

from __future__ import annotations

from graphspec.checkpoints import Checkpoint

from ..llama3.target import load_target as load_llama_like
from ..target import DecoderTarget


def load_target(checkpoint: Checkpoint, *, capacity: int) -> DecoderTarget:
    """As Llama's, with q_norm and k_norm (checkpoints.md §3.2)."""
    return load_llama_like(checkpoint, capacity=capacity, qk_norm=True)
