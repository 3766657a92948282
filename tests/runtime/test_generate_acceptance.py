"""Acceptance statistics count what happened: drafts are forced, so what happens is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from answers import PROMPTS
from forced import ForcedBundle, passes_by_hand
from pairs import FORCED, WIDTHS, K, Pairs

from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
PARAMS = [
    SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0 if row % 2 else 1.3, seed=row)
    for row in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def bundle(pairs: Pairs) -> Iterator[ForcedBundle]:
    with ForcedBundle(pairs.bundle(FORCED)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plain(bundle: ForcedBundle) -> list[tuple[int, ...]]:
    """Answers without speculation."""
    return [answer.token_ids for answer in bundle.generate(PROMPTS, PARAMS, width=0)]


def by_hand(passes: Sequence[tuple[int, int]], width: int) -> AcceptanceStatistics:
    positions = range(width)
    return AcceptanceStatistics(
        verifications=len(passes),
        accepted=sum(accepted for accepted, _ in passes),
        output_tokens=sum(kept for _, kept in passes),
        verified_per_position=[len(passes) for _ in positions],
        reached_per_position=[sum(accepted >= position for accepted, _ in passes) for position in positions],
        accepted_per_position=[sum(accepted > position for accepted, _ in passes) for position in positions],
    )


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_counts_are_those_made_by_hand(
    bundle: ForcedBundle, plain: list[tuple[int, ...]], width: int, share_right: float
) -> None:
    rng = np.random.default_rng(4)
    drafts = [[t if rng.random() < share_right else (t + 1) % 128 for t in tokens] for tokens in plain]
    answers = bundle.generate(PROMPTS, PARAMS, drafts, width=width)
    for answer, tokens, proposed in zip(answers, plain, drafts, strict=True):
        assert answer.token_ids == tokens
        assert answer.acceptance == by_hand(passes_by_hand(proposed, tokens, width), width)
        assert 1 + answer.acceptance.output_tokens == len(tokens)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_an_oracle_has_every_draft_accepted(bundle: ForcedBundle, plain: list[tuple[int, ...]], width: int) -> None:
    num_blocks = 6
    params = [
        SamplingParams(max_new_tokens=1 + num_blocks * (width + 1), temperature=p.temperature, seed=p.seed)
        for p in PARAMS
    ]
    for answer in bundle.generate(PROMPTS, params, plain, width=width):
        assert answer.acceptance.verifications == num_blocks
        assert answer.acceptance.acceptance_length == width
        assert answer.acceptance.acceptance_rate == 1
        assert answer.acceptance.mean_tokens_per_step == width + 1


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_an_adversary_has_none_accepted(bundle: ForcedBundle, plain: list[tuple[int, ...]], width: int) -> None:
    wrong = [[(token + 1) % 128 for token in tokens] for tokens in plain]
    for answer in bundle.generate(PROMPTS, PARAMS, wrong, width=width):
        assert answer.acceptance.accepted == 0
        assert answer.acceptance.verifications == NUM_TOKENS - 1
        assert answer.acceptance.mean_tokens_per_step == 1


def test_nothing_is_counted_without_speculation(bundle: ForcedBundle) -> None:
    (answer,) = bundle.generate(PROMPTS[:1], PARAMS[0], width=0)
    assert answer.acceptance == AcceptanceStatistics()


def test_wider_is_never_slower_in_steps(bundle: ForcedBundle, plain: list[tuple[int, ...]]) -> None:
    """The same drafts, verified further ahead: no more passes."""
    rng = np.random.default_rng(5)
    drafts = [[t if rng.random() < 0.8 else 0 for t in tokens] for tokens in plain]
    passes = [
        [answer.acceptance.verifications for answer in bundle.generate(PROMPTS, PARAMS, drafts, width=width)]
        for width in range(1, K + 1)
    ]
    for narrow, wide in pairwise(passes):
        assert all(a >= b for a, b in zip(narrow, wide, strict=True))
