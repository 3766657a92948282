"""Weights in fewer bits for TensorRT: what is stored, and that a product reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graphs import Array, constant, float32, model_of, run, typed, value_of
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.export.builder import Builder
from graphspec.export.weight_quantisation import WEIGHT_TYPES, WeightType, block_size, quantise, transposed
from graphspec.export.weights import write_safetensors

STEPS = {"int8": 127, "int4": 7}


def restored(weight: Array, kind: WeightType) -> Array:
    """What DequantizeLinear computes, by its definition."""
    stored, scale = (part.astype(np.float32) for part in quantise(weight, kind))
    if kind == "int4":
        size = weight.shape[1] // scale.shape[1]
        scale = np.repeat(scale, size, axis=1)
    elif kind == "int8":
        scale = scale[:, None]
    return np.asarray(stored * scale)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["int8", "int4"]),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    size=st.sampled_from([1e-9, 0.02, 3.0]),
    seed=st.integers(0, 1000),
)
def test_an_integer_weight_is_off_by_half_a_step_at_most(kind: WeightType, dtype: Any, size: float, seed: int) -> None:
    weight = (np.random.default_rng(seed).standard_normal((6, 96)) * size).astype(dtype)
    weight[2] = 0
    wide = weight.astype(np.float32)
    groups = wide.reshape(6, -1, 32 if kind == "int4" else 96)
    step = np.maximum(np.abs(groups).max(axis=2, keepdims=True) / STEPS[kind], 2.0**-14)
    off = np.abs(restored(weight, kind) - wide).reshape(groups.shape)
    # The scale is stored in the weight's type: a bfloat16 one is off by 1/256, which the largest value feels whole.
    rounding = {np.float32: 1e-6, np.float16: 1e-3}.get(dtype, 4e-3)
    assert (off <= step * (0.5 + rounding * STEPS[kind])).all()
    assert (restored(weight, kind)[2] == 0).all()


def test_an_fp8_weight_keeps_three_bits_of_every_value() -> None:
    weight = float32(0, 64, 64)
    scale = np.abs(weight).max() / 448
    normal = np.abs(weight) / scale >= 2.0**-6
    off = np.abs(restored(weight, "fp8") - weight)
    assert (off[normal] <= np.abs(weight)[normal] / 16 + 1e-6).all()
    assert (off[~normal] <= scale * 2.0**-10).all()
    assert quantise(weight, "fp8")[0].dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(("inputs", "block"), [(256, 128), (576, 64), (96, 32), (40, None)])
def test_a_block_divides_the_input_dimension(inputs: int, block: int | None) -> None:
    assert block_size(inputs) == block


@pytest.mark.parametrize("kind", [*WEIGHT_TYPES, None])
@pytest.mark.parametrize("inputs", [64, 40])
def test_a_product_reads_the_stored_weight(kind: WeightType | None, inputs: int) -> None:
    x, weight = float32(1, 3, inputs), float32(2, 8, inputs)
    given, stored = value_of("x", x), constant("w", weight)
    model = model_of([given], [], [], [stored])
    builder = Builder(model.graph)
    product = typed(builder.op("MatMul", [given, transposed(builder, stored, kind)]), "y", x @ weight.T)
    model.graph.extend(builder.take_nodes())
    model.graph.outputs.append(product)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    kept = kind is None or (kind == "int4" and block_size(inputs) is None)
    assert ("w" in model.graph.initializers) == kept
    (found,) = run(model, {"x": x})
    np.testing.assert_allclose(found, x @ (weight if kept or kind is None else restored(weight, kind)).T, atol=1e-4)


def test_two_int4_values_share_a_byte_of_the_weights_file(tmp_path: Path) -> None:
    values = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    path = tmp_path / "w.safetensors"
    places = write_safetensors(path, {"w": ir.tensor(values.astype(ml_dtypes.int4))})
    content = path.read_bytes()
    start, length = places["w"]
    stored = np.frombuffer(content[start : start + length], np.uint8)
    low, high = stored & 15, stored >> 4
    assert (np.stack([low, high], -1).reshape(2, 8).astype(np.int8) == values % 16).all()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["w"]["dtype"] == "U8"
    assert header["w"]["shape"] == [2, 4]
