"""Rotary tables of the default, linear, llama3 and yarn scalings (transformers' `modeling_rope_utils`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphspec.checkpoints import fields
from graphspec.errors import UnsupportedError

FULL_ATTENTION = "full_attention"
"""What configs call layers that attend to everything before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Frequencies of one rotary embedding."""

    inverse_frequencies: Tensor
    """f32[D/2], radians per position."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Reads both spellings: rope_theta + rope_scaling, and rope_parameters (checkpoints.md §1.1). Where a config
    has both, rope_scaling holds and rope_parameters is not read at all, as in transformers.

    Raises UnsupportedError for another kind of scaling, CheckpointError for one that lacks a number.
    """
    parameters = _parameters(config)
    for place in (parameters, config):
        if (partial := fields.number_or(place, "partial_rotary_factor", 1.0)) != 1:
            raise UnsupportedError(f"partial_rotary_factor {partial} is not supported: whole heads are rotated")
    theta = rope_theta(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if factors := config.get("graphspec_rope_freq_factors"):  # GGUF keeps llama3 scaling as one factor each
        return Rope(inverse_frequencies=frequencies / _factors(factors, head_dim // 2))
    if kind == "default":
        return Rope(inverse_frequencies=frequencies)
    if kind == "linear":
        return Rope(inverse_frequencies=frequencies / fields.number(parameters, "factor"))
    if kind == "llama3":
        return Rope(inverse_frequencies=_llama3(frequencies, parameters, config))
    if kind == "yarn":
        return _yarn(theta, head_dim, parameters, config)
    raise UnsupportedError(f"rope scaling {kind!r} is not supported; known are default, linear, llama3 and yarn")


def rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the frequencies, in either spelling."""
    stated = fields.number_or(config, "rope_theta", 10000.0, above=1)
    return fields.number_or(_parameters(config), "rope_theta", stated, above=1)


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scaling of the layers there are: some configs hold one for each kind of layer (checkpoints.md §1.1)."""
    parameters = fields.section(config, "rope_scaling") or fields.section(config, "rope_parameters")
    nested = sorted(key for key, value in parameters.items() if isinstance(value, Mapping))
    if not nested:
        return parameters
    if FULL_ATTENTION not in nested:
        raise UnsupportedError(f"the rope of config.json is for layers of {', '.join(nested)}, not {FULL_ATTENTION}")
    return fields.section(parameters, FULL_ATTENTION)


def _factors(values: object, count: int) -> Tensor:
    key = "graphspec_rope_freq_factors"
    listed = values if isinstance(values, list | tuple) else ()
    if len(listed) != count:
        raise fields.wrong(key, values, f"a list of {count} numbers above 0")
    return torch.tensor([fields.number({key: value}, key) for value in listed], dtype=torch.float32)


def _original_length(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Positions the model knew before its rope was scaled, wherever a config says so."""
    key = "original_max_position_embeddings"
    given = config.get(key) or parameters.get(key) or config.get("max_position_embeddings")
    return fields.number({key: given}, key)


def _llama3(frequencies: Tensor, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: keep short wavelengths, divide long ones, blend between (checkpoints.md §3.1)."""
    factor, low, high = (fields.number(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise fields.wrong("high_freq_factor", high, f"a number above low_freq_factor, {low:g}")
    original = _original_length(parameters, config)
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    middle = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(middle, blended, scaled)


def _yarn(theta: float, dim: int, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """YaRN (arXiv 2309.00071): interpolate long wavelengths, keep short ones, ramp between."""
    factor, original = fields.number(parameters, "factor"), _original_length(parameters, config)
    fast, slow = (
        fields.number_or(parameters, key, default) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )

    def correction(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = correction(fast), correction(slow)
    if fields.switch(parameters, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    base = theta ** (torch.arange(0, dim, 2).float() / dim)
    frequencies = (1.0 / (factor * base)) * (1 - keep) + (1.0 / base) * keep
    return Rope(inverse_frequencies=frequencies, attention_factor=_yarn_attention_factor(factor, parameters))


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := fields.number_or(parameters, "attention_factor", None)) is not None:
        return given
    mscale, mscale_all = (
        fields.number_or(parameters, key, 0.0, above=-math.inf) for key in ("mscale", "mscale_all_dim")
    )
    if mscale and mscale_all:
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)


class RotaryTable(nn.Module):
    """cos and sin of every position a cache can hold."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, positions: int) -> None:
        super().__init__()
        angles = torch.arange(positions).float()[:, None] * rope.inverse_frequencies[None, :]
        self.register_buffer("cos", angles.cos() * rope.attention_factor)
        self.register_buffer("sin", angles.sin() * rope.attention_factor)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions i64[B, T] → cos, sin f32[B, T, D/2]."""
        return nn.functional.embedding(positions, self.cos), nn.functional.embedding(positions, self.sin)
