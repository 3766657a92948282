"""Weights of projections stored in fewer bits, as DequantizeLinear in front of the product: for TensorRT.

    int8   one scale for each output channel
    fp8    float8_e4m3fn, one scale for the whole weight
    int4   one scale for each block of the input dimension

Activations keep their type. The scales are chosen from the weight alone (largest absolute value), so there is
nothing to calibrate.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .builder import Builder
from .weights import derived, static_shape

WeightType = Literal["int8", "fp8", "int4"]
Array = NDArray[Any]

WEIGHT_TYPES: tuple[WeightType, ...] = ("int8", "fp8", "int4")
BLOCKS = (128, 64, 32)
"""Sizes of int4 blocks that TensorRT takes (backends.md §2), the coarsest first."""
_FP8_MAX, _INT8_MAX, _INT4_MAX = 448.0, 127.0, 7.0
_TYPES = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN, "int4": ir.DataType.INT4}
_NUMPY: dict[str, Any] = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "int4": ml_dtypes.int4}


def transposed(builder: Builder, weight: ir.Value, kind: WeightType | None) -> ir.Value:
    """The weight [out, in] as [in, out], the form a MatMul takes, read from fewer bits where `kind` says so.

    int4 needs a block that divides the input dimension; a weight without one keeps its type.
    """
    if kind == "int8":
        return _by_channel(builder, weight)
    stored = weight if kind is None else _dequantised(builder, weight, kind)
    return builder.op("Transpose", [stored], perm=[1, 0])


def _by_channel(builder: Builder, weight: ir.Value) -> ir.Value:
    """Stored transposed: TensorRT-RTX 1.7.1 does not build a Transpose after a scale for each channel."""
    source = weight.const_value
    assert source is not None
    outputs, inputs = static_shape(source)
    shape, dtype = (inputs, outputs), _TYPES["int8"]
    stored = derived(source, lambda w: quantise(w, "int8")[0].T, shape, dtype, f"{weight.name}.int8")
    scales = derived(source, lambda w: quantise(w, "int8")[1], (outputs,), source.dtype, f"{weight.name}.scale")
    values = [builder.initializer(f"{weight.name}.int8", stored), builder.initializer(f"{weight.name}.scale", scales)]
    return builder.op("DequantizeLinear", values, axis=1)


def _dequantised(builder: Builder, weight: ir.Value, kind: Literal["fp8", "int4"]) -> ir.Value:
    source = weight.const_value
    assert source is not None
    outputs, inputs = static_shape(source)
    block = block_size(inputs) if kind == "int4" else inputs
    if block is None:
        return weight
    scale_shape = (outputs, inputs // block) if kind == "int4" else ()
    stored = derived(source, lambda w: quantise(w, kind)[0], (outputs, inputs), _TYPES[kind], f"{weight.name}.{kind}")
    scales = derived(source, lambda w: quantise(w, kind)[1], scale_shape, source.dtype, f"{weight.name}.scale")
    values = [builder.initializer(f"{weight.name}.{kind}", stored), builder.initializer(f"{weight.name}.scale", scales)]
    if kind == "fp8":
        return builder.op("DequantizeLinear", values)
    return builder.op("DequantizeLinear", values, axis=1, block_size=block)


def block_size(inputs: int) -> int | None:
    """The coarsest int4 block that divides a weight's input dimension."""
    return next((size for size in BLOCKS if inputs % size == 0), None)


def quantise(weight: Array, kind: WeightType) -> tuple[Array, Array]:
    """weight [out, in] → stored values of its shape, and scales of the weight's type; stored · scale ≈ weight.

    Rounds to the nearest value after dividing by the scale as it is stored.
    """
    wide = weight.astype(np.float32)
    if kind == "fp8":
        scale = _scale(np.abs(wide).max(), _FP8_MAX, weight.dtype)
        return (wide / scale.astype(np.float32)).clip(-_FP8_MAX, _FP8_MAX).astype(_NUMPY[kind]), scale
    if kind == "int8":
        scale = _scale(np.abs(wide).max(axis=1), _INT8_MAX, weight.dtype)
        rounded = np.rint(wide / scale.astype(np.float32)[:, None])
        return rounded.clip(-_INT8_MAX, _INT8_MAX).astype(_NUMPY[kind]), scale
    size = block_size(wide.shape[1])
    assert size is not None
    blocks = wide.reshape(wide.shape[0], -1, size)
    scale = _scale(np.abs(blocks).max(axis=2), _INT4_MAX, weight.dtype)
    rounded = np.rint(blocks / scale.astype(np.float32)[..., None]).clip(-_INT4_MAX, _INT4_MAX)
    return rounded.reshape(wide.shape).astype(_NUMPY[kind]), scale


def _scale(largest: Any, steps: float, dtype: Any) -> Array:
    """Never 0: a weight of zeros has to be divided by something."""
    tiny = 2.0**-14  # the smallest normal float16
    return np.maximum(np.asarray(largest) / steps, tiny).astype(dtype)
