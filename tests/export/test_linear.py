"""int8 projections against the recipe of design §5, written again in numpy: equal to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graphs import Array, constant, float32, model_of, run, typed, value_of
from numpy.typing import NDArray

from graphspec.export.block_quantisation import BLOCK
from graphspec.export.device import multiplies_uint8_by_int8_exactly
from graphspec.export.dialect import DOMAIN
from graphspec.export.linear import Encoding, WeightSign
from graphspec.export.onnxruntime_lowering import lower

SIGNS: tuple[WeightSign, ...] = ("uint8", "int8") if multiplies_uint8_by_int8_exactly() else ("uint8",)
encodings: tuple[Encoding, ...] = ("float32", "int8", "int4")
sizes = pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 5), (3, 64, 96), (17, 192, 33), (2, 576, 192)])


def project(
    x: Array, weight: Array, encoding: Encoding, sign: WeightSign, bound: float = 0.0, *, is_head: bool = False
) -> NDArray[np.float32]:
    entry, matrix = value_of("x", x), constant("weight", weight)
    node = ir.node("Linear", [entry, matrix], {"bound": bound}, domain=DOMAIN)
    output = typed(node.outputs[0], "y", np.zeros((*x.shape[:-1], len(weight)), np.float32))
    nodes = [node]
    if not is_head:  # what a graph gives out without a step between are logits
        nodes.append(ir.node("Identity", [output]))
        output = typed(nodes[-1].outputs[0], "z", np.zeros((*x.shape[:-1], len(weight)), np.float32))
    model = model_of([entry], nodes, [output], [matrix])
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


@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_zeros_stay_zeros(encoding: Encoding) -> None:
    """Rows without a largest value, and channels without one."""
    x, weight = float32(0, 1, 3, 32), float32(1, 5, 32)
    x[0, 1], weight[2] = 0, 0
    result = project(x, weight, encoding, "uint8")
    assert np.isfinite(result).all()
    assert (result[0, 1] == 0).all()
    assert (result[..., 2] == 0).all()
    assert (result[0, 0, [0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_a_row_does_not_depend_on_the_rows_beside_it(encoding: Encoding) -> None:
    weight = float32(1, 96, 64)
    x = float32(0, 4, 8, 64) * np.array([1, 100, 1e-3, 1e4], np.float32)[:, None, None]
    together = project(x, weight, encoding, SIGNS[-1])
    least = 2 if encoding == "int4" else 1  # manifest.fewest_tokens
    for row in range(4):
        for token in range(9 - least):
            alone = project(x[row : row + 1, token : token + least], weight, encoding, SIGNS[-1])
            assert alone.tobytes() == together[row, token : token + least].tobytes()


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


blocked = pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(2, 32, 5), (3, 64, 96), (17, 576, 33), (2, 1056, 48), (5, 1536, 64)]
)


def q4_1(generator: np.random.Generator, outputs: int, inputs: int) -> NDArray[np.float32]:
    """A weight as GGUF's Q4_1 has it: step · q + least in each block, both float16, q from 0 to 15."""
    blocks = (outputs, inputs // BLOCK, 1)
    q = generator.integers(0, 16, (*blocks[:2], BLOCK))
    q[..., 0], q[..., 1] = 0, 15
    step, least = generator.uniform(0.01, 0.02, blocks).astype(np.float16), generator.normal(-0.1, 0.05, blocks)
    values = step.astype(np.float32) * q.astype(np.float32) + least.astype(np.float16).astype(np.float32)
    return values.reshape(outputs, inputs)


def in_eight_bits(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Every block of a row on a grid of 127 steps to its largest."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    rounded: NDArray[np.float64] = np.rint(blocks / step) * step
    return rounded.reshape(x.shape)


@blocked
def test_int4_keeps_the_weights_of_a_q4_1_file(rows: int, inputs: int, outputs: int) -> None:
    """Far nearer than a grid of 16 whole steps without a least value of its own could come."""
    generator = np.random.default_rng(inputs)
    weight = q4_1(generator, outputs, inputs)
    x = generator.normal(0.3, 1, (1, rows, inputs)).astype(np.float32)  # not around 0: means matter
    blocks = weight.reshape(outputs, -1, BLOCK)
    least, most = blocks.min(axis=2), blocks.max(axis=2)
    middle = (least + 8 * (most - least) / 15).astype(np.float64)  # [out, K / 32]
    means = x.astype(np.float64).reshape(1, rows, -1, BLOCK).mean(axis=-1)
    rough = (blocks - middle[..., None]).reshape(weight.shape)
    expected = in_eight_bits(x) @ rough.T + BLOCK * means @ middle.T
    # Means are integers of 8 bits as well, and what they are multiplied by has two digits of a grid of 7 steps.
    of_means = np.abs(means).max(axis=-1, keepdims=True) / 254 * np.abs(middle).sum(axis=1)
    of_digits = np.abs(means).sum(axis=-1, keepdims=True) * np.abs(middle).max(axis=1) / (7 * 28)
    most_wrong = 1.05 * BLOCK * (of_means + of_digits) + 1e-4
    assert (np.abs(project(x, weight, "int4", "uint8") - expected) < most_wrong).all()
    half_a_step = np.abs(means).sum(axis=-1, keepdims=True) * (most - least).max(axis=1) / 30 * BLOCK
    assert most_wrong.mean() < half_a_step.mean()  # what whole zero points would cost


@blocked
def test_int4_of_any_weights_is_half_a_step_off_at_most(rows: int, inputs: int, outputs: int) -> None:
    weight, x = float32(1, outputs, inputs), float32(0, 1, rows, inputs)
    blocks = weight.reshape(outputs, -1, BLOCK)
    half = (blocks.max(axis=2) - blocks.min(axis=2)) / 30  # [out, K / 32]
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    most = np.abs(x).reshape(1, rows, -1, BLOCK).sum(axis=-1) @ half.T
    activations = np.abs(x - in_eight_bits(x)) @ np.abs(weight).T
    assert (np.abs(project(x, weight, "int4", "uint8") - exact) < most + 2 * activations + 1e-3).all()


@blocked
def test_a_head_of_int4_has_8_bits(rows: int, inputs: int, outputs: int) -> None:
    weight, x = float32(1, outputs, inputs), float32(0, 1, rows, inputs)
    blocks = weight.reshape(outputs, -1, BLOCK)
    step = np.abs(blocks).max(axis=2, keepdims=True) / 127
    rounded = (np.rint(blocks / step) * step).reshape(weight.shape)
    expected = in_eight_bits(x) @ rounded.T.astype(np.float64)
    np.testing.assert_allclose(project(x, weight, "int4", "uint8", is_head=True), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(6, 64), (2, 1, 3, 64), (1, 3, 1, 2, 64)])
def test_rows_may_be_laid_out_in_any_way(shape: tuple[int, ...]) -> None:
    """As those of Medusa heads, which are [B, 1, 1, H]."""
    weight, x = float32(1, 5, 64), float32(0, 1, 6, 64)
    for encoding in encodings:
        found = project(x.reshape(shape), weight, encoding, SIGNS[-1])
        np.testing.assert_array_equal(found.reshape(1, 6, 5), project(x, weight, encoding, SIGNS[-1]))


def test_int4_leaves_what_does_not_divide_into_blocks_in_float() -> None:
    weight, x = float32(1, 7, 48), float32(0, 1, 3, 48)
    np.testing.assert_array_equal(project(x, weight, "int4", "uint8"), project(x, weight, "float32", "uint8"))
