"""Log-probabilities of tokens, from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How probable a token was where it stands: in the model's own distribution, before temperature and filters."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens there as (token id, logprob), as many as were asked for; equal ones by id."""


def token_logprobs(logits: Logits, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Each token's, and the `count` most probable beside it: logits f32[≥ len(token_ids), V], row i is token i's.

    A row's numbers depend on that row alone: no sum runs over two of them.
    """
    return [_token_logprob(row, token_id, count) for row, token_id in zip(logits, token_ids, strict=False)]


def _token_logprob(row: Logits, token_id: int, count: int) -> TokenLogprob:
    highest = row.max()
    normaliser = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    top = tuple((int(best), float(row[best]) - normaliser) for best in _most_probable(row, count))
    return TokenLogprob(token_id=token_id, logprob=float(row[token_id]) - normaliser, top=top)


def _most_probable(row: Logits, count: int) -> NDArray[np.int64]:
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, np.int64)
    lowest = np.partition(row, -count)[-count]
    candidates = np.flatnonzero(row >= lowest)  # more than `count` where tokens tie
    return candidates[np.argsort(-row[candidates], kind="stable")][:count]
