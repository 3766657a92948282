"""What is sampled follows the target's distribution, whatever the drafter proposes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest
from bigram import VOCABULARY, distributions, save_bigram
from forced import METHOD, ForcedBundle
from numpy.typing import NDArray
from scipy import stats

from graphspec.building import build
from graphspec.runtime.answer import Generation
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow


class Settings(TypedDict, total=False):
    """Of SamplingParams."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


NUM_ROWS, NUM_TOKENS = 250, 80  # 20,000 draws
PROMPTS = [[row % VOCABULARY] for row in range(NUM_ROWS)]
SETTINGS: tuple[Settings, ...] = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.3},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bigram(tmp_path_factory.mktemp("bigram") / "target")


@pytest.fixture(scope="module")
def bundle(target: Path) -> Iterator[ForcedBundle]:
    out = target.with_name("bundle")
    build(
        model=target,
        arch_modules=["forced"],
        speculative_method=METHOD,
        num_speculative_tokens=3,
        encoding="float32",
        max_length=96,
        out=out,
    )
    with ForcedBundle(out, num_slots=NUM_ROWS) as loaded:
        yield loaded


def sample(
    bundle: ForcedBundle, settings: Settings, drafts: Sequence[Sequence[int]] = (), *, width: int = 3
) -> list[Generation]:
    params = [SamplingParams(seed=seed, max_new_tokens=NUM_TOKENS, **settings) for seed in range(NUM_ROWS)]
    return bundle.generate(PROMPTS, params, drafts, width=width)


def p_value(answers: Sequence[Generation], expected: NDArray[np.float64]) -> float:
    """Of a chi-square test of all 20,000 draws, each against the distribution after the token before it."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        np.add.at(counts, ([*prompt, *answer.token_ids[:-1]], answer.token_ids), 1)
    assert counts.sum() == 20_000
    assert (counts[expected == 0] == 0).all()
    after = counts.sum(axis=1, keepdims=True)
    possible = (expected > 0) & (after > 0)
    statistic = ((counts - after * expected)[possible] ** 2 / (after * expected)[possible]).sum()
    freedom = possible.sum() - (after > 0).sum()
    return float(stats.chi2.sf(statistic, freedom))


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def plain(request: pytest.FixtureRequest, bundle: ForcedBundle) -> tuple[Settings, list[Generation]]:
    """One of SETTINGS and what is drawn with it without speculation."""
    return request.param, sample(bundle, request.param, width=0)


def test_20_000_draws_follow_the_exact_distribution(target: Path, plain: tuple[Settings, list[Generation]]) -> None:
    settings, answers = plain
    assert p_value(answers, distributions(target, **settings)) > 0.01


@pytest.mark.parametrize(
    ("share_right", "least", "most"), [(1.0, 1, 1), (0.0, 0, 0), (0.5, 0.47, 0.53)], ids=["oracle", "wrong", "half"]
)
def test_they_do_with_a_drafter_that_is_right_always_never_and_every_second_time(
    bundle: ForcedBundle,
    target: Path,
    plain: tuple[Settings, list[Generation]],
    share_right: float,
    least: float,
    most: float,
) -> None:
    settings, expected = plain
    tokens = np.array([answer.token_ids for answer in expected])
    right = np.random.default_rng(0).random(tokens.shape) < share_right
    answers = sample(bundle, settings, np.where(right, tokens, (tokens + 1) % VOCABULARY).tolist())
    statistics = [answer.acceptance for answer in answers]
    accepted = sum(counts.accepted for counts in statistics)
    assert least <= accepted / sum(sum(counts.reached_per_position) for counts in statistics) <= most
    assert p_value(answers, distributions(target, **settings)) > 0.01
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_another_temperature_would_be_seen(bundle: ForcedBundle, target: Path) -> None:
    draws = sample(bundle, {"temperature": 1.0})
    assert p_value(draws, distributions(target, temperature=1.1)) < 1e-3
