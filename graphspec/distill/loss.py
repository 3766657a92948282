"""What a batch teaches: every unrolled draft against the target's distribution over the draft's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.target import DecoderTarget

from .conversations import Conversation
from .features import Features
from .unroll import unroll


class Batch(NamedTuple):
    """Conversations side by side, padded behind."""

    tokens: Tensor
    """i64[B, N]."""
    taps: Tensor
    """f32[B, N, m · H]."""
    final: Tensor
    """f32[B, N, H]."""
    anchors: Tensor
    """bool[B, N]: positions p that serving drafts after: p+1 is a token of the answer."""
    lengths: Tensor
    """i64[B]."""


@dataclass(slots=True)
class Hits:
    """Chains of drafts that went right so far, by unroll, and how many there were."""

    right: list[float] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)

    def add(self, step: int, right: float, chains: int) -> None:
        """Counts one batch at one unroll."""
        for counts in (self.right, self.chains):
            counts.extend([0] * (step + 1 - len(counts)))
        self.right[step] += right
        self.chains[step] += chains

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step that verifies every unroll, the bonus included: an estimate, since it takes
        every position of the answers for one where a step begins."""
        return 1.0 + sum(right / chains for right, chains in zip(self.right, self.chains, strict=True) if chains)


def collate(conversations: Sequence[Conversation], features: Sequence[Features]) -> Batch:
    """A batch in float32."""
    tokens, taps, final = (
        torch.nn.utils.rnn.pad_sequence([f[part] for f in features], batch_first=True) for part in range(3)
    )
    lengths = torch.tensor([len(conversation.tokens) for conversation in conversations])
    prompts = torch.tensor([len(conversation.prompt) for conversation in conversations])
    positions = torch.arange(tokens.shape[1])
    begun = positions >= prompts.unsqueeze(1) - 1
    anchors = begun & (positions + 1 < lengths.unsqueeze(1))
    return Batch(tokens, taps.float(), final.float(), anchors, lengths)


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
