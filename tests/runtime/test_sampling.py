import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from graphspec.errors import RequestError
from graphspec.runtime.sampling import SamplingParams, fresh_seed, uniform_table

SEEDS = st.integers(0, 2**64 - 1)


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """One block of Philox 4x64-10, from its paper (Salmon et al., 2011)."""
    mask = 2**64 - 1
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, column=st.integers(0, 3))
def test_the_table_is_philox_keyed_by_seed_and_column(seed: int, column: int) -> None:
    blocks = [philox_4x64_10([block, 0, 0, 0], [seed, column]) for block in (1, 2, 3)]
    expected = [(word >> 40) / 2**24 for block in blocks for word in block]
    assert uniform_table(seed, 12, 4)[:, column].tolist() == expected


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, short=st.integers(0, 70), more=st.integers(0, 70), columns=st.integers(1, 4))
def test_a_longer_table_starts_with_the_shorter_one(seed: int, short: int, more: int, columns: int) -> None:
    longer = uniform_table(seed, short + more, columns)
    np.testing.assert_array_equal(longer[:short], uniform_table(seed, short, columns))


def test_a_wider_table_holds_the_narrower_one() -> None:
    np.testing.assert_array_equal(uniform_table(7, 100, 3)[:, :2], uniform_table(7, 100, 2))


def test_the_table_is_float32_multiples_of_2_to_the_minus_24_below_one() -> None:
    table = uniform_table(2**64 - 1, 100_000, 2)
    assert table.dtype == np.float32
    assert table.shape == (100_000, 2)
    scaled = table.astype(np.float64) * 2**24
    np.testing.assert_array_equal(scaled, np.floor(scaled))
    assert table.min() >= 0
    assert table.max() < 1


def test_entries_are_uniform() -> None:
    counts, _ = np.histogram(uniform_table(1234, 200_000), bins=64, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_first_entries_of_many_seeds_are_uniform() -> None:
    first = [uniform_table(seed, 1)[0, 0] for seed in range(20_000)]
    assert stats.chisquare(np.histogram(first, bins=32, range=(0, 1))[0]).pvalue > 1e-3


def test_distinct_seeds_and_columns_have_distinct_draws() -> None:
    seeds = (0, 1, 2, 2**32, 2**63, 2**64 - 1)
    columns = {tuple(column) for seed in seeds for column in uniform_table(seed, 50, 2).T.tolist()}
    assert len(columns) == 2 * len(seeds)


def test_columns_are_not_correlated() -> None:
    first, second = uniform_table(99, 50_000, 2).T
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_fresh_seeds_fit_the_table_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", 101, "from 0 to 100"),
        ("temperature", math.nan, "from 0 to 100"),
        ("temperature", math.inf, "from 0 to 100"),
        ("temperature", True, "from 0 to 100"),
        ("temperature", "1", "from 0 to 100"),
        ("temperature", None, "from 0 to 100"),
        ("top_k", -2, "from -1 to 2147483647"),
        ("top_k", 2**31, "from -1 to 2147483647"),
        ("top_k", 5.0, "an integer"),
        ("top_k", True, "an integer"),
        ("top_p", 0.0, "above 0 and up to 1"),
        ("top_p", 1.01, "above 0 and up to 1"),
        ("top_p", math.nan, "above 0 and up to 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("min_p", -math.inf, "from 0 to 1"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", 2**64, "from 0 to 18446744073709551615"),
        ("seed", 1.0, "an integer"),
        ("seed", False, "an integer"),
        ("max_new_tokens", -1, "from 0"),
        ("max_new_tokens", 2.5, "an integer"),
        ("min_tokens", -1, "from 0"),
        ("min_tokens", None, "an integer"),
        ("stop", "</s>", "a list of non-empty strings"),
        ("stop", ("a", ""), "a list of non-empty strings"),
        ("stop", (1,), "a list of non-empty strings"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", (1, -1), "from 0"),
        ("stop_token_ids", (True,), "an integer"),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", "no", "true or false"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)
    assert allowed in str(error.value)
    assert "\n" not in str(error.value)


def test_more_minimum_than_maximum_tokens_are_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"min_tokens is 9.*max_new_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_new_tokens=8)


def test_the_edges_of_every_range_are_allowed() -> None:
    SamplingParams(temperature=100, top_k=-1, top_p=1, min_p=1, seed=2**64 - 1, max_new_tokens=0)
    SamplingParams(temperature=0, top_k=2**31 - 1, top_p=1e-9, min_p=0, seed=0, max_new_tokens=3, min_tokens=3)


def test_lists_become_tuples_so_that_parameters_are_hashable() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3])  # type: ignore[arg-type]
    assert params == SamplingParams(stop=("a",), stop_token_ids=(3,))
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(3,)))


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (0.7, False)])
def test_greedy_is_a_temperature_below_the_threshold(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
