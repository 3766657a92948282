"""The pre-norm decoder layer that targets and drafters share: grouped-query attention and a SwiGLU MLP.

Shapes: B rows, T tokens of a row, S cache capacity, L visible positions, H hidden, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from graphspec.checkpoints import fields
from graphspec.errors import CheckpointError, UnsupportedError

from .. import ops
from .rope import FULL_ATTENTION, Rope, rope_from_config


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a stack of decoder layers, from a Llama-like config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocabulary: int
    rope: Rope
    max_positions: int
    """Longest sequence the checkpoint was made for, in tokens."""
    qk_norm: bool = False
    attention_bias: bool = False
    """On q, k and v."""
    output_bias: bool = False
    """On the projection after attention: of EAGLE heads with biases, only some have it."""
    mlp_bias: bool = False
    tied: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], *, qk_norm: bool = False) -> DecoderConfig:
        """Reads raw config.json keys.

        Raises CheckpointError for a value that is missing or none of its kind, UnsupportedError for layers of
        another kind.
        """
        _check_supported(config)
        heads, hidden = fields.size(config, "num_attention_heads"), fields.size(config, "hidden_size")
        kv_heads = fields.size_or(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json says num_attention_heads is {heads} and num_key_value_heads {kv_heads}: "
                "every key head serves as many query heads as the others"
            )
        head_dim = fields.size_or(config, "head_dim", hidden // heads)
        if head_dim % 2 or not head_dim:
            raise CheckpointError(f"config.json gives heads of size {head_dim} (head_dim), and pairs are rotated")
        attention_bias = fields.switch(config, "attention_bias")
        return cls(
            hidden=hidden,
            intermediate=fields.size(config, "intermediate_size"),
            layers=fields.size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=fields.number_or(config, "rms_norm_eps", 1e-6, nullable=False),
            vocabulary=fields.size(config, "vocab_size"),
            rope=rope_from_config(config, head_dim),
            max_positions=fields.size_or(config, "max_position_embeddings", 2048),
            qk_norm=qk_norm,
            attention_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.switch(config, "mlp_bias"),
            tied=fields.switch(config, "tie_word_embeddings"),
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    """Switches that would change what the layers compute, and that nothing here honours."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {activation!r} of config.json is not supported; known is silu")
    kinds = set(fields.strings(config, "layer_types")) - {FULL_ATTENTION}
    if fields.switch(config, "use_sliding_window") or kinds:
        named = ", ".join(sorted(kinds)) or "use_sliding_window"
        raise UnsupportedError(f"config.json asks for {named}; these layers attend to everything before")


class Linear(nn.Module):
    """A projection [in] → [out] without torch's initialisation: weights always come from a checkpoint."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, device="meta"), requires_grad=False) if bias else None
        self.bound = 0.0
        """See ops.linear."""

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear(x, self.weight, self.bound)
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Rows of a [V, H] table."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, device="meta"), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [B, kv heads, S, D]."""

    keys: Tensor
    values: Tensor


class Window(NamedTuple):
    """Where a pass over several tokens of each row stands."""

    start: Tensor
    """i64[B]: cache position of the first token."""
    cos: Tensor
    sin: Tensor
    """f32[B, T, D/2]."""
    mask: Tensor
    """f32[B, T, L]: 0 where the token sees the position, else -inf."""


class Attention(nn.Module):
    """Grouped-query attention with q, k and v packed in one projection."""

    def __init__(self, config: DecoderConfig, inputs: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.scale = config.head_dim**-0.5
        self.qkv = Linear(inputs or config.hidden, query + 2 * key, bias=config.attention_bias)
        self.output = Linear(query, config.hidden, bias=config.output_bias)
        self.q_norm = Norm(config.head_dim, config.eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.eps) if config.qk_norm else None

    def forward(self, x: Tensor, window: Window, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """x [B, T, inputs] → [B, T, H], writing the T tokens' keys and values into the cache."""
        q, k, v = self.project(x, window.cos, window.sin)
        cache = LayerCache(ops.write_cache(cache.keys, k, window.start), ops.write_cache(cache.values, v, window.start))
        mixed = ops.attention(q, cache.keys, cache.values, window.mask, self.scale)
        return self.output(mixed), cache

    def draft(
        self, x: Tensor, window: Window, cache: LayerCache, drafted: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        """One token [B, 1, inputs] → [B, 1, H], over the cache and the tokens drafted before it.

        `drafted` keys and values [B, kv, N, D] → the same with this token's appended.
        """
        q, k, v = self.project(x, window.cos, window.sin)
        if drafted is not None:
            k, v = torch.cat((drafted.keys, k), dim=2), torch.cat((drafted.values, v), dim=2)
        mixed = ops.draft_attention(q, cache.keys, cache.values, window.mask, k, v, self.scale)
        return self.output(mixed), LayerCache(k, v)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """→ q [B, heads, T, D], k and v [B, kv heads, T, D]."""
        heads = ops.split_heads(self.qkv(x), self.heads + 2 * self.kv_heads)
        if self.q_norm is None or self.k_norm is None:
            rotated, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
            q, k = ops.rotary(rotated, cos, sin).split((self.heads, self.kv_heads), dim=1)
            return q, k, v
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return ops.rotary(self.q_norm(q), cos, sin), ops.rotary(self.k_norm(k), cos, sin), v


class Mlp(nn.Module):
    """down(silu(gate) · up) with gate and up packed in one projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden, 2 * config.intermediate, bias=config.mlp_bias)
        self.down = Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.swiglu(self.gate_up(x)))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); EAGLE's first layer has no norm before attention."""

    def __init__(self, config: DecoderConfig, *, input_norm: bool = True) -> None:
        super().__init__()
        self.input_norm = Norm(config.hidden, config.eps) if input_norm else None
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden, config.eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, window: Window, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        mixed, cache = self.attention(self.normed(x), window, cache)
        return self.feed_forward(x + mixed), cache

    def draft(
        self, x: Tensor, window: Window, cache: LayerCache, drafted: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        """As Attention.draft: one token, nothing written."""
        mixed, drafted = self.attention.draft(self.normed(x), window, cache, drafted)
        return self.feed_forward(x + mixed), drafted

    def normed(self, x: Tensor) -> Tensor:
        """What attention reads."""
        return x if self.input_norm is None else self.input_norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """What follows attention and its residual."""
        return x + self.mlp(self.mlp_norm(x))


class DecoderLayers(nn.ModuleList):
    """A ModuleList that knows what it holds."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[DecoderLayer]: ...
