"""What drafts cost that say something else than the target: the same for every method that drafts chains of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphspec.architectures.target import DecoderTarget

from .batch import Batch, Hits
from .cross_entropy import cross_entropy, distributions


class Anchors(NamedTuple):
    """Positions p after which drafts are made: p+1 is known, and draft j says token p+2+j."""

    positions: Tensor
    """i64[B, A]."""
    taught: Tensor
    """bool[B, A]: False for what only fills a row."""


def teach(
    target: DecoderTarget,
    batch: Batch,
    kept: Tensor,
    anchors: Anchors,
    drafts: Iterable[tuple[Tensor, Tensor]],
    *,
    decay: float,
    imitation: float = 0.0,
    hits: Hits | None = None,
) -> Tensor:
    """Mean cross entropy of each draft with the target's distribution over the tokens `kept` i64[Vd], a draft
    weighing `decay` times the one before; counts hits if asked.

    Where `imitation` is not 0, what a draft's head reads is to be what the target's read there: it is the weight of
    the smooth L1 between the two, the mean over H.

    `drafts` are, of draft 0, 1, …, what its head reads, [B, A, H], and the head's weight [Vd, H]. A draft whose token
    the draft's vocabulary lacks teaches nothing, and counts as wrong.
    """
    teacher = _Teacher(target, batch, kept)
    total, weight, step = torch.zeros(()), 0.0, -1
    alive = anchors.taught
    for step, (read, head) in enumerate(drafts):
        said = anchors.positions + 2 + step
        chains = anchors.taught & teacher.exists(said)
        wanted = teacher.draft_ids(said)
        rows = chains & (wanted >= 0)
        if rows.any():
            outs, asked = read[rows], teacher.rows(said, rows)
            loss, tokens = cross_entropy(outs, head, teacher.distributions, asked)
            if imitation:
                loss = loss + imitation * functional.smooth_l1_loss(outs.float(), teacher.final[asked])
            total, weight = total + loss * decay**step, weight + decay**step
        if hits is not None:
            right = torch.zeros_like(alive)
            if rows.any():
                right[rows] = tokens == wanted[rows]
            alive = alive & right
            hits.add(step, float((alive & chains).sum()), int(chains.sum()))
    return total / max(weight, decay ** (step + 1))


class _Teacher:
    """The tokens at positions i64[B, A], and the distributions that the target had of them."""

    def __init__(self, target: DecoderTarget, batch: Batch, kept: Tensor) -> None:
        self._batch, self._last = batch, batch.tokens.shape[1] - 1
        self._draft_ids = torch.full((target.config.vocabulary,), -1).index_copy(0, kept, torch.arange(len(kept)))
        # Several drafts ask for the same distribution: each is computed once, and found by its row.
        asked = functional.pad(batch.anchors, (1, 0))[:, :-1]  # where the target says a token that can be drafted
        self._rows = asked.flatten().cumsum(0).reshape(asked.shape) - 1
        head = target.head_weight
        self.final = batch.final[asked]
        """f32[D, H]: what the target's head read."""
        self.distributions = distributions(self.final, head if len(kept) == len(head) else head[kept])
        """f32[D, Vd]."""

    def exists(self, positions: Tensor) -> Tensor:
        """bool[B, A]: whether the text is so long."""
        return positions < self._batch.lengths.unsqueeze(1)

    def draft_ids(self, positions: Tensor) -> Tensor:
        """i64[B, A]: the draft's ids of the tokens there, -1: it has none."""
        return self._draft_ids[self._batch.tokens.gather(1, positions.clamp(max=self._last))]

    def rows(self, positions: Tensor, chosen: Tensor) -> Tensor:
        """i64[M]: where `distributions` has what the target thought of those `positions` that are `chosen`
        bool[B, A]."""
        return self._rows.gather(1, (positions - 1).clamp(max=self._last))[chosen]
