"""Conversations side by side with what the target thinks of them, and the count of drafts that went right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .conversations import Conversation
from .features import Features
from .padding import side_by_side


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
    """Chains of drafts that went right so far, by draft, and how many there were."""

    right: list[float] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)

    def add(self, step: int, right: float, chains: int) -> None:
        """Counts one batch at one draft."""
        for counts in (self.right, self.chains):
            counts.extend([0] * (step + 1 - len(counts)))
        self.right[step] += right
        self.chains[step] += chains

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step that verifies every draft, the bonus included: an estimate, since it takes
        every position of the answers for one where a step begins."""
        return 1.0 + sum(right / chains for right, chains in zip(self.right, self.chains, strict=True) if chains)


def collate(conversations: Sequence[Conversation], features: Sequence[Features]) -> Batch:
    """A batch in float32."""
    tokens = side_by_side([f.tokens for f in features])
    taps, final = (side_by_side([f[part].float() for f in features]) for part in (1, 2))
    lengths = torch.tensor([len(conversation.tokens) for conversation in conversations])
    prompts = torch.tensor([len(conversation.prompt) for conversation in conversations])
    positions = torch.arange(tokens.shape[1])
    begun = positions >= prompts.unsqueeze(1) - 1
    anchors = begun & (positions + 1 < lengths.unsqueeze(1))
    return Batch(tokens, taps, final, anchors, lengths)
