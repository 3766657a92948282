"""EAGLE-3 heads as a chain (arXiv 2503.01840; checkpoints.md §4.2), speculators layout included.

The first layer reads 2H values, [norm(embed(x_{p+1})) | norm(g)], where g is fc of several raw hidden states
of the target at position p, or the head's own output for tokens it drafted itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..blocks.decoder import (
    Attention,
    DecoderConfig,
    DecoderLayer,
    DecoderLayers,
    LayerCache,
    Linear,
    Mlp,
    Norm,
    Window,
)
from ..blocks.rope import RotaryTable
from ..state import flatten, layer_caches
from ..step import Verified
from ..target import DecoderTarget, draft_window, window
from .ends import Ends, TappingDrafter


class FusedInputLayer(nn.Module):
    """The first layer: attention over [embedding | feature], residual on the feature."""

    def __init__(self, config: DecoderConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_norm = Norm(config.hidden, config.eps)
        self.hidden_norm = Norm(config.hidden, config.eps)
        self.attention = Attention(config, inputs=2 * config.hidden)
        self.mlp_norm = Norm(config.hidden, config.eps)
        self.mlp = Mlp(config)

    def forward(self, embedded: Tensor, feature: Tensor, at: Window, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """embedded, feature [B, T, H] → [B, T, H], writing the cache."""
        residual, joined = self.join(embedded, feature)
        mixed, cache = self.attention(joined, at, cache)
        return self.feed_forward(residual + mixed), cache

    def draft(
        self, embedded: Tensor, feature: Tensor, at: Window, cache: LayerCache, drafted: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        """The same for one drafted token, nothing written."""
        residual, joined = self.join(embedded, feature)
        mixed, drafted = self.attention.draft(joined, at, cache, drafted)
        return self.feed_forward(residual + mixed), drafted

    def join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """→ the residual [B, T, H], and what attention reads, [B, T, 2H]."""
        normed = self.hidden_norm(feature)
        joined = torch.cat((self.input_norm(embedded), normed), dim=-1)
        return (normed if self.norm_before_residual else feature), joined

    def feed_forward(self, x: Tensor) -> Tensor:
        """What follows attention and its residual: [B, T, H] → [B, T, H]."""
        return x + self.mlp(self.mlp_norm(x))


class Eagle3Drafter(TappingDrafter):
    """fc over the target's taps; layers; its own norm and (pruned) head, or the target's head."""

    def __init__(
        self,
        config: DecoderConfig,
        ends: Ends,
        *,
        taps: tuple[int, ...],
        target_hidden: int,
        tap_norms: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        fc_bias: bool = False,
        num_draft_tokens: int,
        capacity: int,
    ) -> None:
        super().__init__(config, ends, taps=taps, num_draft_tokens=num_draft_tokens)
        self.norm_output = norm_output
        hidden, eps = config.hidden, config.eps
        self.tap_norms = nn.ModuleList([Norm(target_hidden, eps) for _ in taps if tap_norms])
        self.before_fc = Norm(len(taps) * target_hidden, eps) if norm_before_fc else None
        self.fc = Linear(len(taps) * target_hidden, hidden, bias=fc_bias)
        self.first = FusedInputLayer(config, norm_before_residual=norm_before_residual)
        self.rest = DecoderLayers(DecoderLayer(config) for _ in range(1, config.layers))
        self._add_head(ends)
        self.rotary = RotaryTable(config.rope, capacity)

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        assert verified.hidden.taps is not None
        following = verified.tokens[:, 1:]  # x_{p+1} beside the feature of p
        at = window(self.rotary, verified.kv_len, following.shape[1], verified.key_positions)
        first, *others = layer_caches(states)
        feature = self.fuse_taps(verified.hidden.taps)
        x, first = self.first(self.embed(target, following), feature, at, first)
        caches = [first]
        for layer, cache in zip(self.rest, others, strict=True):
            x, cache = layer(x, at, cache)
            caches.append(cache)
        token, feature = self._decide(target, ops.take_rows(x, verified.last.unsqueeze(1)))
        drafts = [token]
        drafted: list[LayerCache | None] = [None] * len(caches)
        for step in range(1, self.num_draft_tokens):
            position = verified.next_kv_len - 1 + step
            at = draft_window(self.rotary, position, verified.next_kv_len, verified.key_positions)
            embedded = self.embed(target, token)
            x, drafted[0] = self.first.draft(embedded, feature, at, caches[0], drafted[0])
            for index, layer in enumerate(self.rest, start=1):
                x, drafted[index] = layer.draft(x, at, caches[index], drafted[index])
            token, feature = self._decide(target, x)
            drafts.append(token)
        return torch.cat(drafts, dim=1), flatten(caches)

    def fuse_taps(self, taps: Tensor) -> Tensor:
        """[B, T, m · Ht] → [B, T, H]."""
        if len(self.tap_norms):
            chunks = taps.chunk(len(self.tap_norms), dim=-1)
            taps = torch.cat([norm(c) for norm, c in zip(self.tap_norms, chunks, strict=True)], dim=-1)
        return self.fc(taps if self.before_fc is None else self.before_fc(taps))

    def _decide(self, target: DecoderTarget, out: Tensor) -> tuple[Tensor, Tensor]:
        """Layer output [B, 1, H] → the drafted token i64[B, 1] in the target's ids, and the next feature."""
        normed = self.norm(out)
        return self.decide(target, normed), (normed if self.norm_output else out)
