"""The draft's vocabulary: the tokens that the target's answers use most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from graphspec.errors import ConfigError

from .conversations import Conversation


def choose_vocabulary(conversations: Iterable[Conversation], size: int, target_size: int) -> Tensor:
    """The `size` commonest tokens of the answers, ascending i64[size]; ties and unused tokens: lowest id first.

    Raises ConfigError if the target has fewer.
    """
    check_vocabulary_size(size, target_size)
    counts = Counter(token for conversation in conversations for token in conversation.answer)
    by_use = sorted(range(target_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(by_use[:size]))


def check_vocabulary_size(size: int, target_size: int) -> None:
    """Raises ConfigError for a draft that would say more tokens than its target, or none."""
    if not 1 <= size <= target_size:
        raise ConfigError(f"--draft-vocab-size {size}: give 1 to {target_size}, the size of the target's vocabulary")


def draft_to_target(kept: Tensor) -> Tensor:
    """d2t i64[Vd]: what is added to a draft id to get the target's (checkpoints.md §4.2)."""
    return kept - torch.arange(len(kept))


def target_to_draft(kept: Tensor, target_size: int) -> Tensor:
    """t2d bool[V]: whether the draft has the token."""
    return torch.zeros(target_size, dtype=torch.bool).index_fill(0, kept, True)


def coverage(conversations: Iterable[Conversation], kept: Tensor) -> float:
    """Share of the answers' tokens that the draft can say."""
    known = set(kept.tolist())
    tokens = [token for conversation in conversations for token in conversation.answer]
    return sum(token in known for token in tokens) / len(tokens) if tokens else 0.0
