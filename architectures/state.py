"""What a row keeps on the device between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .blocks.decoder import DecoderConfig, LayerCache

FloatType = Literal["float32", "float16", "bfloat16"]
Dim = int | Literal["batch", "capacity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One tensor that a step reads and writes in place."""

    name: str
    shape: tuple[Dim, ...]
    dtype: FloatType | Literal["int64"] = "float32"

    def sizes(self, batch: int, capacity: int) -> list[int]:
        """The shape, of so many rows and positions."""
        named = {"batch": batch, "capacity": capacity}
        return [named[dim] if isinstance(dim, str) else dim for dim in self.shape]


def cache_specs(prefix: str, config: DecoderConfig) -> tuple[StateSpec, ...]:
    """Keys and values of every layer, in the order `layer_caches` reads them."""
    shape: tuple[Dim, ...] = ("batch", config.kv_heads, "capacity", config.head_dim)
    return tuple(
        StateSpec(name=f"{prefix}.{layer}.{part}", shape=shape)
        for layer in range(config.layers)
        for part in ("keys", "values")
    )


def layer_caches(states: list[Tensor]) -> list[LayerCache]:
    """[k0, v0, k1, v1, …] → one LayerCache for each layer."""
    return [LayerCache(*pair) for pair in zip(states[::2], states[1::2], strict=True)]


def flatten(caches: list[LayerCache]) -> list[Tensor]:
    """The inverse of `layer_caches`."""
    return [tensor for cache in caches for tensor in cache]
