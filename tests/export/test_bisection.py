"""Sample, lowered for TensorRT, against its definition in float64; ONNX Runtime runs the same nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from drawing import Filters
from graphs import model_of, run, typed, value_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler import Case, Sampler, cases, check_draws, sampler

from graphspec.export.tensorrt_lowering import lower

SMALL, LARGE = 50, 4000
"""Fewer values, and more, than TensorRT's TopK takes (3,840)."""


@pytest.fixture(scope="module")
def samplers() -> dict[int, Sampler]:
    return {vocabulary: sampler(vocabulary, lower) for vocabulary in (SMALL, LARGE)}


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.3, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, SMALL - 1, SMALL, SMALL + 1, LARGE - 1, LARGE, 10_000]),
    top_p=st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.99, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.7, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(case=cases([SMALL, SMALL, LARGE], FILTERS))
def test_every_position_draws_what_the_definition_says(samplers: dict[int, Sampler], case: Case) -> None:
    check_draws(samplers[case.vocabulary], case)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_of_equal_logits_the_first_is_taken_or_all_are_drawn(samplers: dict[int, Sampler], temperature: float) -> None:
    logits = np.zeros((1, 1000, SMALL))
    draws = np.random.default_rng(0).random((1, 1000))
    drawn = samplers[SMALL](logits, [Filters(temperature=temperature, top_k=1)], draws)
    assert set(drawn[0]) == ({0} if temperature == 0 else set(range(SMALL)))


def test_an_argmax_takes_the_first_of_equal_values_and_is_none_of_tensorrts() -> None:
    """TensorRT's says nothing about ties; bfloat16 has many."""
    logits = np.round(np.random.default_rng(3).standard_normal((2, 3, 40)) * 2).astype(np.float32)
    x = value_of("x", logits)
    node = ir.node("ArgMax", [x], attributes={"axis": -1, "keepdims": 0})
    model = lower(model_of([x], [node], [typed(node.outputs[0], "y", np.zeros((2, 3), np.int64))]))
    assert "ArgMax" not in {node.op_type for node in model.graph}
    (found,) = run(model, {"x": logits})
    np.testing.assert_array_equal(found, logits.argmax(-1))
