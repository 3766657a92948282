"""sample_tokens against its definition, in float64: temperature → top-k → top-p → min-p → inverse CDF."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from drawing import Filters, answers, distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.architectures.sampling import sample_tokens

LAST = 1 - 2**-24
"""The largest uniform number there is."""


def sampled(logits: list[list[float]], filters: list[Filters], uniform: list[float]) -> list[int]:
    """sample_tokens of one position in each row."""
    tokens = sample_tokens(
        torch.tensor(logits).unsqueeze(1),
        torch.tensor([f.temperature for f in filters]),
        torch.tensor([f.top_k for f in filters]),
        torch.tensor([f.top_p for f in filters]),
        torch.tensor([f.min_p for f in filters]),
        torch.tensor(uniform).unsqueeze(1),
    )
    return [int(token) for token in tokens.squeeze(1)]


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.3, 50.0]),
    top_k=st.integers(0, 20),
    top_p=st.one_of(st.sampled_from([1e-6, 0.5, 0.9, 1.0]), st.integers(1, 2**20).map(lambda i: i * 2**-20)),
    min_p=st.one_of(st.sampled_from([0.0, 0.05, 1.0]), st.integers(0, 2**20).map(lambda i: i * 2**-20)),
)
UNIFORM = st.one_of(st.sampled_from([0, 2**24 - 1]), st.integers(0, 2**24 - 1)).map(lambda i: i * 2**-24)
# Eighths: equal ones tie exactly in float32 too, and different ones stay apart.
ROW = st.tuples(st.lists(st.integers(-40, 40), min_size=16, max_size=16), FILTERS, UNIFORM)
FEW_VALUES = st.tuples(st.lists(st.integers(-2, 2), min_size=16, max_size=16), FILTERS, UNIFORM)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.one_of(ROW, FEW_VALUES), min_size=1, max_size=4))
def test_every_row_draws_what_the_definition_says(rows: list[tuple[list[int], Filters, float]]) -> None:
    logits = [[value / 8 for value in values] for values, _, _ in rows]
    filters, uniform = [f for _, f, _ in rows], [u for _, _, u in rows]
    tokens = sampled(logits, filters, uniform)
    for token, own, f, u in zip(tokens, logits, filters, uniform, strict=True):
        assert token in answers(np.array(own), f, u)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=4))
def test_a_row_draws_the_same_alone(rows: list[tuple[list[int], Filters, float]]) -> None:
    logits = [[value / 8 for value in values] for values, _, _ in rows]
    together = sampled(logits, [f for _, f, _ in rows], [u for _, _, u in rows])
    assert together == [sampled([own], [f], [u])[0] for own, (_, f, u) in zip(logits, rows, strict=True)]


EACH = (
    Filters(temperature=0.7),
    Filters(temperature=1.3),
    Filters(top_k=5),
    Filters(top_p=0.9),
    Filters(min_p=0.05),
    Filters(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
)


@pytest.mark.parametrize("filters", EACH, ids=str)
def test_uniform_numbers_that_cover_the_interval_give_the_exact_distribution(filters: Filters) -> None:
    count = 4096
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4))
    uniform = [(i + 0.5) / count for i in range(count)]
    tokens = sampled([logits.tolist()] * count, [filters] * count, uniform)
    found = np.bincount(tokens, minlength=12) / count
    assert np.abs(found - distribution(logits.double().numpy(), filters)).max() <= 1 / count


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (Filters(), {0, 1, 2, 3, 4}),
        (Filters(top_k=1), {0}),
        (Filters(top_k=2), {0, 1, 2, 3}),  # three tie for the second rank
        (Filters(top_k=99), {0, 1, 2, 3, 4}),
        (Filters(top_p=1e-6), {0}),
        (Filters(top_p=0.39), {0}),
        (Filters(top_p=0.41), {0, 1, 2, 3}),
        (Filters(top_k=2, top_p=0.45), {0, 1, 2, 3}),  # of the four that top-k left, the first holds 0.4 / 0.97
        (Filters(top_k=2, top_p=0.40), {0}),
        (Filters(min_p=1.0), {0}),
        (Filters(min_p=0.4), {0, 1, 2, 3}),
        (Filters(temperature=0.0, top_k=5, top_p=0.5), {0}),
    ],
    ids=str,
)
def test_filters_keep_these_by_hand(filters: Filters, kept: set[int]) -> None:
    logits = np.log([0.40, 0.19, 0.19, 0.19, 0.03]).tolist()
    uniform = [0.0, *(i / 512 for i in range(512)), LAST]
    assert set(sampled([logits] * 514, [filters] * 514, uniform)) == kept


@pytest.mark.parametrize("uniform", [0.0, LAST])
@pytest.mark.parametrize("seed", range(20))
def test_the_ends_of_the_interval_draw_tokens_that_were_kept(uniform: float, seed: int) -> None:
    """Large vocabularies, where a float32 sum is least exact; the first and the last token are filtered out."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(seed))
    logits[0] = logits[-1] = -30.0
    filters = Filters(top_k=50 + seed, top_p=0.97)
    (token,) = sampled([logits.tolist()], [filters], [uniform])
    assert token in answers(logits.double().numpy(), filters, uniform)
    assert logits[token] >= logits.sort(descending=True).values[filters.top_k - 1]


def test_argmax_takes_the_first_of_equals() -> None:
    assert sampled([[0.0, 2.0, 1.0, 2.0]], [Filters(temperature=0.0)], [LAST]) == [1]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = [float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]
    uniform = [0.0, 0.25, 0.5, 0.75, LAST]
    assert sampled([logits] * 5, [Filters()] * 5, uniform) == [1, 1, 3, 3, 3]


def test_positions_of_a_row_share_its_filters_and_have_their_own_numbers() -> None:
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(5))
    uniform = torch.tensor([[0.1, 0.5, 0.9], [0.9, 0.5, 0.1]])
    settings_ = (torch.tensor([1.3, 0.0]), torch.tensor([5, 0]), torch.tensor([0.9, 1.0]), torch.tensor([0.0, 0.5]))
    tokens = sample_tokens(logits, *settings_, uniform)
    filters = (Filters(temperature=1.3, top_k=5, top_p=0.9), Filters(temperature=0.0))
    for row, position in itertools.product(range(2), range(3)):
        own = logits[row, position].double().numpy()
        assert int(tokens[row, position]) in answers(own, filters[row], float(uniform[row, position]))
