"""A decoder-only target, as the fused step and the drafters see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import ops
from .blocks.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderLayers,
    Embedding,
    LayerCache,
    Linear,
    Norm,
    Window,
)
from .blocks.rope import RotaryTable
from .blocks.rotation import Rotation
from .state import StateSpec, cache_specs


class Hidden(NamedTuple):
    """What a pass over the target leaves for the accept rule and the drafter."""

    normed: Tensor
    """[B, T, H]: what the target's own head reads; `final` unless the residual stream is turned."""
    final: Tensor
    """[B, T, H]: output of the last norm."""
    taps: Tensor | None
    """[B, T, m · H]: raw hidden states entering the tapped layers, concatenated (checkpoints.md §0.1, IN)."""


class DecoderTarget(nn.Module):
    """Embedding, decoder layers, norm, head: Llama 3 and Qwen3, and any draft LM of these families."""

    def __init__(self, config: DecoderConfig, *, capacity: int) -> None:
        super().__init__()
        self.config, self.capacity = config, capacity
        self.embedding = Embedding(config.vocabulary, config.hidden)
        self.layers = DecoderLayers(DecoderLayer(config) for _ in range(config.layers))
        self.norm = Norm(config.hidden, config.eps)
        self.head = None if config.tied else Linear(config.hidden, config.vocabulary)
        self.rotary = RotaryTable(config.rope, capacity)
        self.rotation: Rotation | None = None
        """Of the residual stream of the layers and what the head reads; everything outside sees it as it was."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Keys and values of every layer."""
        return cache_specs("target", self.config)

    def tie_equal_head(self) -> None:
        """Drops a head that is a copy of the embedding."""
        if self.head is not None and torch.equal(self.head.weight, self.embedding.weight):
            self.head = None
            self.config = replace(self.config, tied=True)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens i64[B, T] → [B, T, H]. Placeholders (-1) read row 0: nothing they lead to is committed."""
        return self.embedding(tokens.clamp(min=0))

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, final: Tensor) -> Tensor:
        """final hidden states [B, R, H], the target's or a drafter's → f32[B, R, V]."""
        return self.own_logits(final if self.rotation is None else self.rotation.normed(final))

    def own_logits(self, normed: Tensor) -> Tensor:
        """Hidden.normed [B, R, H] → f32[B, R, V]."""
        logits = ops.linear(normed, self.head_weight) if self.head is None else self.head(normed)
        return logits.float()

    def final(self, normed: Tensor) -> Tensor:
        """Hidden.normed [B, R, H] → Hidden.final of the same rows."""
        return normed if self.rotation is None else self.rotation.final(normed)

    def window(self, start: Tensor, tokens: Tensor, key_positions: Tensor) -> Window:
        """The window of tokens i64[B, T] at positions start[b] …, each seeing key_positions i64[L] up to its own."""
        return window(self.rotary, start, tokens.shape[1], key_positions)

    def forward(
        self, tokens: Tensor, window: Window, caches: list[LayerCache], taps: tuple[int, ...] = ()
    ) -> tuple[Hidden, list[LayerCache]]:
        """tokens i64[B, T] → hidden states of every token, and the caches with them written."""
        x, entering, updated = self._enter(tokens), [], []
        for layer, cache in zip(self.layers, caches, strict=True):
            entering.append(x)
            x, cache = layer(x, window, cache)
            updated.append(cache)
        entering.append(x)
        tapped = torch.cat([entering[tap] for tap in taps], dim=-1) if taps else None
        normed = self.norm(x)
        if self.rotation is not None and tapped is not None:
            tapped = self.rotation.back(tapped)
        return Hidden(normed, self.final(normed), tapped), updated

    def _enter(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        return embedded if self.rotation is None else self.rotation.into(embedded)

    def draft(
        self, token: Tensor, window: Window, caches: list[LayerCache], drafted: list[LayerCache] | None
    ) -> tuple[Tensor, list[LayerCache]]:
        """One token i64[B, 1] as a draft LM runs it → final hidden [B, 1, H]; the caches stay as they are."""
        x, grown = self._enter(token), []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x, new = layer.draft(x, window, cache, drafted[index] if drafted else None)
            grown.append(new)
        return self.final(self.norm(x)), grown


def window(rotary: RotaryTable, start: Tensor, length: int, key_positions: Tensor) -> Window:
    """A causal window of `length` tokens from start[b]."""
    positions = start.unsqueeze(1) + torch.arange(length)
    cos, sin = rotary(positions)
    return Window(start, cos, sin, visible(key_positions, positions))


def draft_window(rotary: RotaryTable, position: Tensor, cached: Tensor, key_positions: Tensor) -> Window:
    """One drafted token at position i64[B] that sees the first cached i64[B] positions."""
    cos, sin = rotary(position.unsqueeze(1))
    return Window(position, cos, sin, visible(key_positions, (cached - 1).unsqueeze(1)))


def visible(key_positions: Tensor, last: Tensor) -> Tensor:
    """f32[B, T, L]: 0 where key_positions[l] ≤ last[b, t], else -inf."""
    return torch.where(key_positions <= last.unsqueeze(2), 0.0, float("-inf"))
