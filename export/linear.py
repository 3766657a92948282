"""Projections on ONNX Runtime's CPU provider, by encoding.

int4: weights in blocks of 32 (block_quantisation.py); heads in 8 bits, and in float what does not divide into blocks.

int8 (design §5): weights per output channel, activations per row, so a row's result does not depend on the
rows beside it; where the magnitude of a row is known beforehand, one grid serves all. Activations are uint8 with
zero point 128. What the weights are stored as depends on the CPU (onnxruntime/core/mlas/lib/platform.cpp): with
VNNI or AMX, uint8 × int8 is exact and fastest; with AVX2 alone it saturates, and uint8 × uint8 is exact and as
fast. int8 × int8 has no kernel there at all. Both exact forms compute the same integers, so their results are
equal.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .block_quantisation import BLOCK, BlockLowering
from .builder import MICROSOFT, Builder
from .weights import derived, static_shape

Encoding = Literal["float32", "int8", "int4"]
WeightSign = Literal["uint8", "int8"]


class LinearLowering:
    """Lowers Linear nodes; a weight used twice (a tied head) is stored once, an input quantised once."""

    def __init__(self, builder: Builder, encoding: Encoding, weight_sign: WeightSign) -> None:
        self._builder, self._encoding, self._sign = builder, encoding, weight_sign
        self._blocks = BlockLowering(builder)
        self._weights: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._quantised: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._rows: dict[tuple[ir.Value, float], ir.Value] = {}

    def lower(self, x: ir.Value, weight: ir.Value, *, bound: float = 0.0, is_head: bool = False) -> ir.Value:
        """x [..., in], weight [out, in] → [..., out]; bound: as ops.linear's. `is_head`: the outputs are logits."""
        if self._encoding == "float32":
            return self._float32(x, weight)
        if self._encoding == "int4":
            return self._int4(x, weight, is_head=is_head)
        return self._bounded(x, weight, bound) if bound else self._int8(x, weight)

    def _int4(self, x: ir.Value, weight: ir.Value, *, is_head: bool) -> ir.Value:
        """A head has twice the bits, as in llama.cpp's mixtures: every token's logit comes straight from it."""
        source, (_, inputs) = _stored(weight)
        if inputs % BLOCK:
            return self._float32(x, weight)
        return (self._blocks.eight_bits if is_head else self._blocks.four_bits)(x, weight, source)

    def _float32(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        if weight not in self._weights:
            source, (rows, columns) = _stored(weight)
            tensor = derived(source, np.transpose, (columns, rows), ir.DataType.FLOAT, f"{weight.name}.transposed")
            self._weights[weight] = (self._builder.initializer(f"{weight.name}.transposed", tensor),)
        (transposed,) = self._weights[weight]
        return self._builder.op("MatMul", [x, transposed])

    def _int8(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        op, const = self._builder.op, self._builder.constant
        if x not in self._quantised:
            largest = op("ReduceMax", [op("Abs", [x]), const([-1])], keepdims=1)
            # A row of zeros becomes NaN here, some integer next, and is multiplied by 0 in the end.
            unit = op("Div", [x, largest])
            rows = op("QuantizeLinear", [unit, const(1 / 127), const(128, np.uint8)])
            self._quantised[x] = (rows, largest)
        rows, largest = self._quantised[x]
        return op("Mul", [self._product(rows, 1 / 127, weight), largest])

    def _bounded(self, x: ir.Value, weight: ir.Value, bound: float) -> ir.Value:
        """One grid for every row: no look at the row, and values beyond it become its ends."""
        const = self._builder.constant
        if (x, bound) not in self._rows:
            self._rows[x, bound] = self._builder.op("QuantizeLinear", [x, const(bound / 127), const(128, np.uint8)])
        return self._product(self._rows[x, bound], bound / 127, weight)

    def _product(self, rows: ir.Value, step: float, weight: ir.Value) -> ir.Value:
        const = self._builder.constant
        integers, scales, zero = self._int8_weight(weight)
        inputs = [rows, integers, const(step), scales, const(128, np.uint8), zero]
        return self._builder.op("MatMulIntegerToFloat", inputs, domain=MICROSOFT)

    def _int8_weight(self, weight: ir.Value) -> tuple[ir.Value, ...]:
        if weight not in self._weights:
            source, (rows, columns) = _stored(weight)
            signed = self._sign == "int8"
            dtype = ir.DataType.INT8 if signed else ir.DataType.UINT8

            def integers(values: NDArray[np.float32]) -> NDArray[Any]:
                rounded = np.rint(values / row_scales(values)[:, None]).T
                stored: NDArray[Any] = rounded.astype(np.int8) if signed else (rounded + 128).astype(np.uint8)
                return stored

            name = weight.name
            self._weights[weight] = (
                self._builder.initializer(
                    f"{name}.{self._sign}", derived(source, integers, (columns, rows), dtype, f"{name}.{self._sign}")
                ),
                self._builder.initializer(
                    f"{name}.scales", derived(source, row_scales, (rows,), ir.DataType.FLOAT, f"{name}.scales")
                ),
                self._builder.constant(0, np.int8) if signed else self._builder.constant(128, np.uint8),
            )
        return self._weights[weight]


def row_scales(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """One step of each output channel's 8-bit grid: max |w| / 127, f32[out]; 1 for a channel of zeros."""
    largest = np.abs(weight).max(axis=1)
    return np.where(largest > 0, largest, 127).astype(np.float32) / np.float32(127)


def _stored(weight: ir.Value) -> tuple[ir.TensorProtocol, tuple[int, int]]:
    assert weight.const_value is not None, f"{weight.name} is not a weight"
    rows, columns = static_shape(weight.const_value)
    return weight.const_value, (rows, columns)
