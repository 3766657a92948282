"""Checkpoint names of a Llama-like causal LM (checkpoints.md §3.1, §3.2: Qwen3 adds norms of q and k)."""

from __future__ import annotations

from ..blocks.decoder import DecoderConfig
from ..blocks.decoder_weights import layer_sources
from ..weights import Source, one

HEAD = "lm_head.weight"


def sources(config: DecoderConfig) -> dict[str, Source]:
    """Where every parameter of a DecoderTarget comes from."""
    found = {
        "embedding.weight": one("model.embed_tokens.weight"),
        "norm.weight": one("model.norm.weight"),
    }
    if not config.tied:
        found["head.weight"] = one(HEAD)
    for layer in range(config.layers):
        found |= layer_sources(f"layers.{layer}", f"model.layers.{layer}", config)
    return found


def is_derived(name: str) -> bool:
    """Tensors that the model computes instead of loading."""
    return name.endswith(".rotary_emb.inv_freq") or name == "rope_freqs.weight"
