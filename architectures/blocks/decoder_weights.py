"""The checkpoint names of a decoder layer: the same in Llama, Qwen3 and every draft made of such layers."""

from __future__ import annotations

from ..weights import Source, one
from .decoder import DecoderConfig


def layer_sources(parameter: str, tensor: str, config: DecoderConfig, *, input_norm: bool = True) -> dict[str, Source]:
    """Sources of one DecoderLayer: `parameter` and `tensor` are the prefixes of its names on either side."""
    sources = attention_sources(f"{parameter}.attention", f"{tensor}.self_attn", config)
    sources |= mlp_sources(f"{parameter}.mlp", f"{tensor}.mlp", config)
    sources[f"{parameter}.mlp_norm.weight"] = one(f"{tensor}.post_attention_layernorm.weight")
    if input_norm:
        sources[f"{parameter}.input_norm.weight"] = one(f"{tensor}.input_layernorm.weight")
    return sources


def attention_sources(parameter: str, tensor: str, config: DecoderConfig) -> dict[str, Source]:
    """q, k and v stacked; o; norms of q and k where the family has them."""
    rows = (config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2)
    sources = {f"{parameter}.output.weight": one(f"{tensor}.o_proj.weight")}
    if config.output_bias:
        sources[f"{parameter}.output.bias"] = one(f"{tensor}.o_proj.bias")
    for part in ("weight", "bias") if config.attention_bias else ("weight",):
        names = tuple(f"{tensor}.{projection}_proj.{part}" for projection in "qkv")
        sources[f"{parameter}.qkv.{part}"] = Source(names, rows)
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            sources[f"{parameter}.{norm}.weight"] = one(f"{tensor}.{norm}.weight")
    return sources


def mlp_sources(parameter: str, tensor: str, config: DecoderConfig) -> dict[str, Source]:
    """gate and up stacked; down."""
    sources = {}
    for part in ("weight", "bias") if config.mlp_bias else ("weight",):
        names = (f"{tensor}.gate_proj.{part}", f"{tensor}.up_proj.{part}")
        sources[f"{parameter}.gate_up.{part}"] = Source(names, (config.intermediate,) * 2)
        sources[f"{parameter}.down.{part}"] = one(f"{tensor}.down_proj.{part}")
    return sources
