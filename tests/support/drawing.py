"""What a token drawn from logits should be: the definition of sampling, in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SLACK = 1e-5
"""What float32 may shift a threshold or a bound between two tokens by, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """How one row draws."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def distribution(logits: Floats, filters: Filters) -> Floats:
    """What is drawn from: probabilities of the tokens kept, which sum to 1, 0 for the others."""
    exponentials = np.exp((logits - logits.max()) / filters.temperature)
    probabilities = exponentials / exponentials.sum()
    if filters.top_k:
        smallest = np.sort(probabilities)[::-1][min(filters.top_k, len(logits)) - 1]
        probabilities = np.where(probabilities >= smallest, probabilities, 0)
        probabilities /= probabilities.sum()
    if filters.top_p < 1:
        ordered = np.sort(probabilities)[::-1]
        size = 1 + int(np.argmax(np.cumsum(ordered) >= min(filters.top_p, ordered.sum() - 1e-12)))
        probabilities = np.where(probabilities >= ordered[size - 1], probabilities, 0)
    probabilities = np.where(probabilities >= filters.min_p * probabilities.max(), probabilities, 0)
    result: Floats = probabilities / probabilities.sum()
    return result


def answers(logits: Floats, filters: Filters, uniform: float) -> set[int]:
    """The token that the definition says; both where float32 may decide a near tie either way."""
    if filters.temperature == 0:
        return {int(np.argmax(logits))}
    found: set[int] = set()
    for p, m in itertools.product((1 - SLACK, 1.0, 1 + SLACK), repeat=2):
        top_p = filters.top_p if filters.top_p == 1 else min(filters.top_p * p, 1 - 1e-12)
        near = Filters(
            temperature=filters.temperature,
            top_k=filters.top_k,
            top_p=top_p,
            min_p=min(filters.min_p * m, 1.0),
        )
        drawn_from = distribution(logits, near)
        above = np.cumsum(drawn_from)
        below = above - drawn_from
        inside = (drawn_from > 0) & (below <= uniform + SLACK) & (uniform < above + SLACK)
        found |= {int(token) for token in np.flatnonzero(inside)}
    return found
