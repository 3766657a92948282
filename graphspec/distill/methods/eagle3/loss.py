"""What a batch teaches: every unrolled draft against the target's distribution over the draft's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.recipe import Recipe

from .unroll import unroll


def loss(
    drafter: Eagle3Drafter,
    target: DecoderTarget,
    batch: Batch,
    recipe: Recipe,
    generator: torch.Generator,  # noqa: ARG001 - every position is taught
    *,
    hits: Hits | None = None,
) -> Tensor:
    """`batch_loss` as training asks for it."""
    return batch_loss(drafter, target, batch, depth=recipe.depth, decay=recipe.decay, hits=hits)


def batch_loss(
    drafter: Eagle3Drafter, target: DecoderTarget, batch: Batch, *, depth: int, decay: float, hits: Hits | None = None
) -> Tensor:
    """Mean cross entropy of the unrolls, each weighing `decay` times the one before; counts hits if asked.

    A draft whose token the draft's vocabulary lacks teaches nothing, and counts as wrong.
    """
    assert drafter.head is not None
    kept = torch.arange(len(drafter.offsets)) + drafter.offsets
    draft_ids = _draft_ids(kept, target.config.vocabulary)
    first = int(batch.anchors.any(0).nonzero()[0])
    asked = _Asked(batch, kept, target, first)
    total, weight = torch.zeros(()), 0.0
    alive = batch.anchors[:, first:]
    for step, out in enumerate(unroll(drafter, target, batch.tokens, batch.taps, depth=depth, first=first)):
        chains = batch.anchors[:, first:] & asked.exists(step)
        wanted = draft_ids[asked.tokens(step)]
        rows = chains & (wanted >= 0)
        if rows.any():
            logits = drafter.head(drafter.norm(out[rows]))
            loss = -(asked.distribution(step, rows) * functional.log_softmax(logits, dim=-1)).sum(-1).mean()
            total, weight = total + loss * decay**step, weight + decay**step
        if hits is not None:
            right = torch.zeros_like(alive)
            if rows.any():
                right[rows] = logits.argmax(-1) == wanted[rows]
            alive = alive & right
            hits.add(step, float((alive & chains).sum()), int(chains.sum()))
    return total / max(weight, decay**depth)


class _Asked:
    """The tokens and distributions that follow each position."""

    def __init__(self, batch: Batch, kept: Tensor, target: DecoderTarget, first: int) -> None:
        self._batch, self._first = batch, first
        # Several unrolls ask for the same distribution: each is computed once, and found by its row.
        said = functional.pad(batch.anchors, (1, 0))[:, :-1]  # where the target says a token that can be drafted
        self._rows = said.flatten().cumsum(0).reshape(said.shape) - 1
        head = (target.embedding.weight if target.head is None else target.head.weight)[kept]
        self._distributions = torch.softmax(functional.linear(batch.final[said], head), dim=-1)

    def exists(self, step: int) -> Tensor:
        """bool[B, N - first]: whether the text holds the token that unroll `step` drafts there."""
        return self._positions() + 2 + step < self._batch.lengths.unsqueeze(1)

    def tokens(self, step: int) -> Tensor:
        """i64[B, N - first]: that token; 0 beyond the end."""
        return self._ahead(self._batch.tokens, 2 + step)

    def distribution(self, step: int, rows: Tensor) -> Tensor:
        """f32[M, Vd]: the target's, over the draft's vocabulary alone."""
        return self._distributions[self._ahead(self._rows, 1 + step)[rows]]

    def _ahead(self, values: Tensor, distance: int) -> Tensor:
        return functional.pad(values[:, self._first :], (0, distance))[:, distance:]

    def _positions(self) -> Tensor:
        return torch.arange(self._first, self._batch.tokens.shape[1])


def _draft_ids(kept: Tensor, target_size: int) -> Tensor:
    """i64[V]: the draft's id of each target token, or -1."""
    return torch.full((target_size,), -1).index_copy(0, kept, torch.arange(len(kept)))
