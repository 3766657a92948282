"""Sample, lowered for ONNX Runtime, against its definition in float64, below and above the candidates it sorts."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from drawing import Filters
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler import Case, Sampler, cases, check_draws, sampler

from graphspec.export.onnxruntime_lowering import lower
from graphspec.export.sampling_lowering import CANDIDATES

SMALL, LARGE = 50, 3 * CANDIDATES


def lowered(model: ir.Model) -> None:
    lower(model, "float32", "uint8")


@pytest.fixture(scope="module")
def samplers() -> dict[int, Sampler]:
    return {vocabulary: sampler(vocabulary, lowered) for vocabulary in (SMALL, CANDIDATES, CANDIDATES + 1, LARGE)}


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.3, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 2000, 10_000]),
    top_p=st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.99, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.7, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(case=cases([SMALL, CANDIDATES, CANDIDATES + 1, LARGE], FILTERS))
def test_every_position_draws_what_the_definition_says(samplers: dict[int, Sampler], case: Case) -> None:
    check_draws(samplers[case.vocabulary], case)


PEAKED = Filters(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01)
FLAT = Filters(temperature=20.0, top_p=0.99)
DEEP = Filters(temperature=1.0, top_k=CANDIDATES + 500)


@pytest.mark.parametrize("other", [FLAT, DEEP, Filters(temperature=0.0, top_k=CANDIDATES + 500, top_p=0.5)])
@pytest.mark.parametrize("own", [PEAKED, Filters(temperature=1.0, top_p=0.9), Filters(temperature=1.3, min_p=0.02)])
def test_a_row_draws_the_same_where_another_needs_the_whole_vocabulary(
    samplers: dict[int, Sampler], own: Filters, other: Filters
) -> None:
    """Its threshold then comes from the whole vocabulary's order instead of the candidates'."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 40, LARGE)) * 4
    draws = rng.random((1, 40))
    alone = samplers[LARGE](logits, [own], draws)
    beside = np.concatenate([logits, rng.standard_normal((1, 40, LARGE))])
    together = samplers[LARGE](beside, [own, other], np.concatenate([draws, draws]))
    np.testing.assert_array_equal(together[0], alone[0])
    assert len(np.unique(alone)) > 3


def test_the_whole_vocabulary_is_used_where_the_candidates_are_not_enough(samplers: dict[int, Sampler]) -> None:
    """A flat distribution with a nucleus of 99 %: draws come from far beyond the candidates."""
    logits = np.linspace(1, 0, LARGE)[None, None].repeat(200, axis=1)
    draws = np.linspace(0, 1 - 2**-24, 200)[None]
    tokens = samplers[LARGE](logits, [Filters(temperature=1.0, top_p=0.99)], draws)
    assert tokens.max() > 2.5 * CANDIDATES
    tokens = samplers[LARGE](logits, [Filters(temperature=1.0, top_k=2 * CANDIDATES)], draws)
    assert 1.9 * CANDIDATES < tokens.max() < 2 * CANDIDATES


@pytest.mark.parametrize(("vocabulary", "tied"), [(SMALL, 4), (SMALL, 40), (LARGE, 40), (LARGE, CANDIDATES + 200)])
def test_ties_that_top_k_keeps_count_in_the_mass_of_top_p(
    samplers: dict[int, Sampler], vocabulary: int, tied: int
) -> None:
    """One token of weight 4 and `tied` ones of weight 1 follow; top-k keeps all of these or none."""
    logits = np.full((1, 101, vocabulary), -30.0)
    logits[..., 7] = np.log(4)
    logits[..., 8 : 8 + tied] = 0
    draws = np.linspace(0, 1 - 2**-24, 101)[None]
    for share in (0.7, 1.3):  # of the likeliest token's share of what top-k keeps
        top_p = share * 4 / (4 + tied)
        tokens = samplers[vocabulary](logits, [Filters(temperature=1.0, top_k=3, top_p=top_p)], draws)
        if share < 1:
            assert (tokens == 7).all()
        else:
            assert tokens.min() == 7
            assert tokens.max() == 7 + tied


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
def test_greedy_rows_are_argmax_beside_sampled_ones(samplers: dict[int, Sampler], vocabulary: int) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 4, vocabulary))
    filters = [Filters(temperature=0.0, top_k=3), Filters(temperature=1.3), Filters(temperature=0.0)]
    tokens = samplers[vocabulary](logits, filters, np.full((3, 4), 0.999))
    expected = logits.astype(np.float32).argmax(axis=-1)
    np.testing.assert_array_equal(tokens[[0, 2]], expected[[0, 2]])
    assert (tokens[1] != expected[1]).any()
