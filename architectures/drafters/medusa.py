"""Medusa heads as a chain (arXiv 2401.10774; checkpoints.md §4.9).

    h        the target's final hidden state at p, the newest position in its cache: its own head says the pending
             token, p+1
    head i   h through n blocks x ↦ x + silu(linear(x)), then a projection to the vocabulary    → token p+2+i

No head sees what another says, nor the pending token: all are one pass, and nothing is kept between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from ..blocks.decoder import Linear
from ..state import StateSpec
from ..step import Verified
from ..target import DecoderTarget


class MedusaHead(nn.Module):
    """What comes behind the first block: the others, and the projection unless it is the target's."""

    def __init__(self, hidden: int, *, blocks: int, bias: bool, vocabulary: int | None) -> None:
        super().__init__()
        self.rest = nn.ModuleList(Linear(hidden, hidden, bias=bias) for _ in range(1, blocks))
        self.output = Linear(hidden, vocabulary) if vocabulary else None

    def forward(self, x: Tensor) -> Tensor:
        """The first block's output [..., H] → the last one's."""
        for linear in self.rest:
            x = x + functional.silu(linear(x))
        return x

    def project(self, x: Tensor) -> Tensor:
        """What a head with a projection of its own says: [..., H] → [..., V]."""
        assert self.output is not None
        return self.output(x)


class MedusaHeads(nn.ModuleList):
    """A ModuleList that knows what it holds."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[MedusaHead]: ...


class MedusaDrafter(nn.Module):
    """K heads; their first blocks, which read the same, are one projection."""

    taps: tuple[int, ...] = ()
    states: tuple[StateSpec, ...] = ()

    def __init__(self, hidden: int, *, num_draft_tokens: int, blocks: int, bias: bool, vocabulary: int | None) -> None:
        """`vocabulary`: of heads with a projection of their own; None: the target's head is theirs."""
        super().__init__()
        self.hidden, self.num_draft_tokens, self.blocks = hidden, num_draft_tokens, blocks
        self.own_output = vocabulary is not None
        self.first = Linear(hidden, num_draft_tokens * hidden, bias=bias)
        self.heads = MedusaHeads(
            MedusaHead(hidden, blocks=blocks, bias=bias, vocabulary=vocabulary) for _ in range(num_draft_tokens)
        )

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        newest = ops.take_rows(verified.hidden.normed, verified.last.unsqueeze(1))  # [B, 1, H]
        features = self.features(target.final(newest)).squeeze(2)  # [B, K, H]
        if not self.own_output:
            return target.logits(features).argmax(dim=-1), []
        rows = torch.split(features, 1, dim=1)
        drafts = [head.project(row).argmax(dim=-1) for head, row in zip(self.heads, rows, strict=True)]
        return torch.cat(drafts, dim=1), []

    def features(self, final: Tensor) -> Tensor:
        """Final hidden states [B, A, H] → [B, K, A, H], what each head's projection reads."""
        first = functional.silu(self.first(final))
        x = final.unsqueeze(1) + ops.split_heads(first, self.num_draft_tokens)
        if self.blocks == 1:
            return x
        return torch.cat([head(part) for head, part in zip(self.heads, torch.split(x, 1, dim=1), strict=True)], dim=1)
