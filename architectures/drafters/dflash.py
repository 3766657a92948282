"""DFlash: one pass over a block proposes all its tokens at once (arXiv 2602.06036; checkpoints.md §4.6).

    block     [x_n, mask, …, mask] at positions n … n+K
    context   hidden_norm(fc(raw hidden states of the target)) of every committed position

The context is keys and values of every layer, and nothing else: it has no rows of its own. A block row sees the
whole context and the whole block. Row k says the token at position n+k; row 0, the token that is known, says none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..blocks.decoder import DecoderConfig, DecoderLayer, LayerCache, Linear, Norm
from ..blocks.rope import RotaryTable
from ..state import flatten, layer_caches
from ..step import Verified
from ..target import DecoderTarget, visible
from .ends import Ends, TappingDrafter


class BlockWindow(NamedTuple):
    """Where a block of R rows stands, and the T context positions that a step adds."""

    start: Tensor
    """i64[B]: cache position of the first of the T."""
    cos: Tensor
    sin: Tensor
    """f32[B, R + T, D/2]: of the block, then of the context."""
    mask: Tensor
    """f32[B, R, L]: 0 where a cached position is seen, else -inf."""


class BlockLayer(DecoderLayer):
    """A decoder layer whose attention reads context beside its own rows."""

    def forward_block(
        self, x: Tensor, context: Tensor, at: BlockWindow, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """x [B, R, H] → [B, R, H]; the keys and values of context [B, T, H] are written, those of x are not."""
        rows = x.shape[1]
        q, k, v = self.attention.project(torch.cat((self.normed(x), context), dim=1), at.cos, at.sin)
        cache = LayerCache(
            ops.write_cache(cache.keys, k[:, :, rows:], at.start),
            ops.write_cache(cache.values, v[:, :, rows:], at.start),
        )
        mixed = ops.draft_attention(
            q[:, :, :rows],
            cache.keys,
            cache.values,
            at.mask,
            k[:, :, :rows],
            v[:, :, :rows],
            self.attention.scale,
        )
        return self.feed_forward(x + self.attention.output(mixed)), cache


class BlockLayers(nn.ModuleList):
    """A ModuleList that knows what it holds."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[BlockLayer]: ...


class DFlashDrafter(TappingDrafter):
    """fc and norm over the target's taps; layers; a norm; the target's embedding and head, or the draft's own."""

    def __init__(
        self,
        config: DecoderConfig,
        ends: Ends,
        *,
        taps: tuple[int, ...],
        target_hidden: int,
        mask_token: int,
        num_draft_tokens: int,
        capacity: int,
    ) -> None:
        super().__init__(config, ends, taps=taps, num_draft_tokens=num_draft_tokens)
        self.mask_token = mask_token
        self.fc = Linear(len(taps) * target_hidden, config.hidden)
        self.context_norm = Norm(config.hidden, config.eps)
        self.layers = BlockLayers(BlockLayer(config) for _ in range(config.layers))
        self._add_head(ends)
        # A block reaches one position further than drafts that are made one by one.
        self.rotary = RotaryTable(config.rope, capacity + 1)

    @property
    def block_size(self) -> int:
        """Rows of a block: the pending token and the drafts."""
        return self.num_draft_tokens + 1

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        assert verified.hidden.taps is not None
        context = self.context(verified.hidden.taps)
        at = self._window(verified, context.shape[1])
        pending = ops.take_rows(verified.tokens, verified.last.unsqueeze(1) + 1)
        x = self.embed(target, self.block(pending))
        caches = []
        for layer, cache in zip(self.layers, layer_caches(states), strict=True):
            x, cache = layer.forward_block(x, context, at, cache)
            caches.append(cache)
        return self.decide(target, self.norm(x[:, 1:])), flatten(caches)

    def context(self, taps: Tensor) -> Tensor:
        """[B, T, m · Ht] → [B, T, H], what every layer makes keys and values of."""
        return self.context_norm(self.fc(taps))

    def block(self, pending: Tensor) -> Tensor:
        """The tokens of a block, i64[B, 1] → i64[B, R]."""
        return nn.functional.pad(pending, (0, self.num_draft_tokens), value=self.mask_token)

    def _window(self, verified: Verified, count: int) -> BlockWindow:
        block = verified.next_kv_len.unsqueeze(1) + torch.arange(self.block_size)
        added = verified.kv_len.unsqueeze(1) + torch.arange(count)
        cos, sin = self.rotary(torch.cat((block, added), dim=1))
        last = (verified.next_kv_len - 1).unsqueeze(1).expand(-1, self.block_size)
        return BlockWindow(verified.kv_len, cos, sin, visible(verified.key_positions, last))
