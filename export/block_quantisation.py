"""Weights in blocks of 32 inputs, for ONNX Runtime's MatMulNBits with activations in 8 bits (accuracy level 4).

4 bits: w = step · q + least with q = 0 … 15, a block's own step and least: what GGUF calls Q4_1, so weights that
come from such a file keep their values. MatMulNBits knows w = step · (q - 8) alone (or another whole number for 8).
What is missing is the same for a block's 32 weights, so it multiplies the mean of the 32 activations: the means are
appended to the row, once more for a second digit, and what they are multiplied by to the weight, as further blocks.

    row     [ x, K           | means, P | means, P ]        K a multiple of 32, K/32 means, P the next multiple of 32
    weight  [ step · (q - 8) | high     | low      ]

8 bits: w = step · q with q = -127 … 127, as GGUF's Q8_0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .builder import MICROSOFT, Builder
from .weights import derived, static_shape

BLOCK = 32
_EXACT = 4
"""MatMulNBits' accuracy_level: activations as int8, one scale for each block of a row."""
_STEPS = 7
"""Of a digit's grid on either side of 0."""

Floats = NDArray[np.float32]


class Blocks(NamedTuple):
    """A weight as MatMulNBits reads it."""

    packed: NDArray[np.uint8]
    """[out, blocks, 32 · bits / 8]."""
    scales: Floats
    """[out, blocks]."""


class BlockLowering:
    """Lowers Linear nodes; a weight used twice is stored once, a row's means are computed once."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._weights: dict[tuple[ir.Value, int], tuple[ir.Value, ir.Value]] = {}
        self._extended: dict[ir.Value, ir.Value] = {}

    def four_bits(self, x: ir.Value, weight: ir.Value, source: ir.TensorProtocol) -> ir.Value:
        """x [..., K], weight [out, K] → [..., out]."""
        outputs, inputs = static_shape(source)
        if x not in self._extended:
            self._extended[x] = self._with_means(x, inputs)
        return self._product(self._extended[x], weight, source, (outputs, _extended_size(inputs)), bits=4)

    def eight_bits(self, x: ir.Value, weight: ir.Value, source: ir.TensorProtocol) -> ir.Value:
        """x [..., K], weight [out, K] → [..., out]."""
        outputs, inputs = static_shape(source)
        return self._product(x, weight, source, (outputs, inputs), bits=8)

    def _with_means(self, x: ir.Value, inputs: int) -> ir.Value:
        op, blocks = self._builder.op, inputs // BLOCK
        twice = np.eye(blocks, _padded(blocks), dtype=np.float32)
        means = op("MatMul", [self._means(x), self._builder.constant(np.hstack([twice, twice]))])
        return op("Concat", [x, means], axis=-1)

    def _means(self, x: ir.Value) -> ir.Value:
        """[..., K] → [..., K / 32]."""
        assert x.shape is not None, x
        op, axes = self._builder.op, len(x.shape)
        if axes == 2:  # pooling has at least three
            rows = op("Unsqueeze", [x, self._builder.constant([0])])
            pooled = op("AveragePool", [rows], kernel_shape=[BLOCK], strides=[BLOCK])
            return op("Squeeze", [pooled, self._builder.constant([0])])
        size = [*[1] * (axes - 3), BLOCK]
        return op("AveragePool", [x], kernel_shape=size, strides=size)

    def _product(
        self, x: ir.Value, weight: ir.Value, source: ir.TensorProtocol, shape: tuple[int, int], *, bits: int
    ) -> ir.Value:
        (outputs, inputs), make = shape, four_bit_blocks if bits == 4 else eight_bit_blocks
        blocks = inputs // BLOCK
        if (weight, bits) not in self._weights:
            name = f"{weight.name}.blocks{bits}"
            packed = derived(
                source,
                lambda w: make(w).packed,
                (outputs, blocks, BLOCK * bits // 8),
                ir.DataType.UINT8,
                name,
            )
            scales = derived(source, lambda w: make(w).scales, (outputs, blocks), ir.DataType.FLOAT, f"{name}.scales")
            self._weights[weight, bits] = (
                self._builder.initializer(name, packed),
                self._builder.initializer(f"{name}.scales", scales),
            )
        sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": BLOCK, "accuracy_level": _EXACT}
        return self._builder.op("MatMulNBits", [x, *self._weights[weight, bits]], domain=MICROSOFT, **sizes)


def four_bit_blocks(weight: Floats) -> Blocks:
    """weight f32[out, K] → its blocks, then those of what the means are multiplied by."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    least = blocks.min(axis=2)
    step = (blocks.max(axis=2) - least) / np.float32(15)
    middle, step = least + 8 * step, _never_zero(step)
    levels = np.rint((blocks - middle[..., None]) / step[..., None])
    high, low = _digits(middle * np.float32(BLOCK))  # of a mean, not a sum
    values = [levels + 8, *(digit.values + 8 for digit in (high, low))]
    scales = [step, high.step, low.step]
    return Blocks(_packed(np.concatenate(values, axis=1)), np.concatenate(scales, axis=1))


def eight_bit_blocks(weight: Floats) -> Blocks:
    """weight f32[out, K] → its blocks."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    step = _never_zero(np.abs(blocks).max(axis=2) / np.float32(127))
    return Blocks((np.rint(blocks / step[..., None]) + 128).astype(np.uint8), step)


class _Digit(NamedTuple):
    values: Floats
    """[out, blocks, 32], -7 … 7."""
    step: Floats
    """[out, blocks]."""


def _digits(numbers: Floats) -> tuple[_Digit, _Digit]:
    """numbers [out, n] as values · step of two grids, the second of what the first leaves; zeros behind the n."""
    room = _padded(numbers.shape[1]) - numbers.shape[1]
    blocks = np.pad(numbers, ((0, 0), (0, room))).reshape(len(numbers), -1, BLOCK)
    step = _never_zero(np.abs(blocks).max(axis=2) / np.float32(_STEPS))
    high = np.rint(blocks / step[..., None])
    rest, finer = blocks - high * step[..., None], step / np.float32(2 * _STEPS)
    low = np.rint(rest / finer[..., None]).clip(-_STEPS, _STEPS)
    return _Digit(high, step), _Digit(low, finer)


def _packed(levels: NDArray[Any]) -> NDArray[np.uint8]:
    """[out, blocks, 32] of 0 … 15 → [out, blocks, 16]: the first of two in the lower bits."""
    small = levels.astype(np.uint8)
    return small[..., ::2] | small[..., 1::2] * np.uint8(16)


def _never_zero(step: Floats) -> Floats:
    """A block of equal values divides by something."""
    return np.where(step > 0, step, 1).astype(np.float32)


def _padded(blocks: int) -> int:
    return -(-blocks // BLOCK) * BLOCK


def _extended_size(inputs: int) -> int:
    return inputs + 2 * _padded(inputs // BLOCK)
