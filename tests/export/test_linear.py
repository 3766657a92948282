"""int8 projections against the recipe of design §5, written again in numpy: equal to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graphs import Array, constant, float32, model_of, run, typed, value_of
from numpy.typing import NDArray

from graphspec.export.device import multiplies_uint8_by_int8_exactly
from graphspec.export.dialect import DOMAIN
from graphspec.export.linear import Encoding, WeightSign
from graphspec.export.onnxruntime_lowering import lower

SIGNS: tuple[WeightSign, ...] = ("uint8", "int8") if multiplies_uint8_by_int8_exactly() else ("uint8",)
sizes = pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 5), (3, 64, 96), (17, 192, 33), (2, 576, 192)])


def project(x: Array, weight: Array, encoding: Encoding, sign: WeightSign, bound: float = 0.0) -> NDArray[np.float32]:
    entry, matrix = value_of("x", x), constant("weight", weight)
    node = ir.node("Linear", [entry, matrix], {"bound": bound}, domain=DOMAIN)
    output = typed(node.outputs[0], "y", np.zeros((*x.shape[:-1], len(weight)), np.float32))
    model = model_of([entry], [node], [output], [matrix])
    lower(model, encoding, sign)
    (result,) = run(model, {"x": x}, optimise=True)
    return result


def by_hand(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights on a grid of 127 steps to each channel's largest, activations on one to each row's."""
    step, one = np.float32(1 / 127), np.float32(1)
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    weights = np.rint(weight / scales[:, None]).astype(np.int64)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    rows = np.rint(x / largest / step).astype(np.int64)
    sums = (rows @ weights.T).astype(np.float32)
    product: Array = sums * (step * scales * one) * largest
    return product


@sizes
@pytest.mark.parametrize("sign", SIGNS)
def test_int8_is_the_recipe_bit_for_bit(rows: int, inputs: int, outputs: int, sign: WeightSign) -> None:
    x = float32(0, 2, rows, inputs) * np.float32(3)
    weight = float32(1, outputs, inputs)
    result, expected = project(x, weight, "int8", sign), by_hand(x, weight)
    np.testing.assert_array_equal(result, expected)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(result - exact).max() < 0.02 * np.abs(exact).max()


@sizes
@pytest.mark.parametrize("sign", SIGNS)
def test_rows_of_a_known_magnitude_share_a_grid_that_ends_at_the_bound(
    rows: int, inputs: int, outputs: int, sign: WeightSign
) -> None:
    x = float32(0, 2, rows, inputs) * np.float32(1.5)
    weight, bound = float32(1, outputs, inputs), 4.0
    assert rows * inputs < 1000 or np.abs(x).max() > bound
    step = np.float32(bound / 127)
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    integers = np.clip(np.rint(x / step), -128, 127).astype(np.int64)
    sums = (integers @ np.rint(weight / scales[:, None]).astype(np.int64).T).astype(np.float32)
    np.testing.assert_array_equal(project(x, weight, "int8", sign, bound), sums * (step * scales))


@pytest.mark.parametrize("sign", SIGNS)
def test_the_largest_values_do_not_saturate(sign: WeightSign) -> None:
    """Two products of 255 and 127 are more than 16 bits hold."""
    x = np.ones((1, 1, 64), np.float32)
    weight = np.stack([np.ones(64), -np.ones(64)]).astype(np.float32)
    np.testing.assert_allclose(project(x, weight, "int8", sign), [[[64, -64]]], rtol=1e-6)
    np.testing.assert_allclose(project(-x, weight, "int8", sign), [[[-64, 64]]], rtol=1e-6)


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_zeros_stay_zeros(encoding: Encoding) -> None:
    """Rows without a largest value, and channels without one."""
    x, weight = float32(0, 1, 3, 16), float32(1, 5, 16)
    x[0, 1], weight[2] = 0, 0
    result = project(x, weight, encoding, "uint8")
    assert np.isfinite(result).all()
    assert (result[0, 1] == 0).all()
    assert (result[..., 2] == 0).all()
    assert (result[0, 0, [0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_a_row_does_not_depend_on_the_rows_beside_it(encoding: Encoding) -> None:
    weight = float32(1, 96, 64)
    x = float32(0, 4, 8, 64) * np.array([1, 100, 1e-3, 1e4], np.float32)[:, None, None]
    together = project(x, weight, encoding, SIGNS[-1])
    for row in range(4):
        for token in range(8):
            alone = project(x[row : row + 1, token : token + 1], weight, encoding, SIGNS[-1])
            assert alone.tobytes() == together[row, token].tobytes()


@sizes
def test_both_signs_store_the_same_integers(rows: int, inputs: int, outputs: int) -> None:
    weight = float32(rows, outputs, inputs)
    stored: dict[str, Any] = {}
    for sign in ("uint8", "int8"):
        entry, matrix = value_of("x", float32(0, 1, rows, inputs)), constant("weight", weight)
        node = ir.node("Linear", [entry, matrix], domain=DOMAIN)
        output = typed(node.outputs[0], "y", np.zeros((1, rows, outputs), np.float32))
        model = model_of([entry], [node], [output], [matrix])
        lower(model, "int8", sign)
        value = model.graph.initializers[f"weight.{sign}"].const_value
        assert value is not None
        stored[sign] = value.numpy()
        assert stored[sign].dtype == sign
    np.testing.assert_array_equal(stored["uint8"].astype(int) - 128, stored["int8"].astype(int))
    assert np.abs(stored["int8"].astype(int)).max() == 127
