"""Replaces the nodes of dialect.py by standard ONNX that TensorRT's parser and builder take (backends.md §2).

Strongly typed: a graph traced in float16 or bfloat16 stays so; norms, rotary, softmax of samples and the accept
rule are float32 islands. Every size but those of the inputs is static.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from .bisection import lower_argmax, lower_sample
from .builder import Builder
from .lowering import merge_heads, replace_dialect, replace_node, split_heads, static_size, take_rows
from .weight_quantisation import WeightType, transposed

_LOWEST = {ir.DataType.FLOAT: -3.0e38, ir.DataType.BFLOAT16: -3.0e38, ir.DataType.FLOAT16: -65504.0}
"""An additive mask's "not visible": an infinity would make a row without any visible key NaN."""


def lower(model: ir.Model, weights: WeightType | None = None) -> ir.Model:
    """The same graph, in place, in standard operators; projections read `weights`, or the type they were traced in."""
    lowering = _Lowering(Builder(model.graph), weights)
    replace_dialect(model, lowering.builder, lowering.lower)
    for node in [node for node in model.graph if node.op_type == "ArgMax"]:
        replace_node(model, lowering.builder, node, lowering.argmax(node))
    return model


class _Lowering:
    def __init__(self, builder: Builder, weights: WeightType | None) -> None:
        self.builder, self._weights = builder, weights
        self._masks: dict[tuple[ir.Value, ir.DataType, int], ir.Value] = {}
        self._transposed: dict[ir.Value, ir.Value] = {}

    def lower(self, node: ir.Node) -> ir.Value:
        """The value that replaces a node's output."""
        inputs = [value for value in node.inputs if value is not None]
        op = self.builder.op
        scale = node.attributes["scale"].as_float() if "scale" in node.attributes else 1.0
        by_name: dict[str, Callable[[], ir.Value]] = {
            "Linear": lambda: self._linear(*inputs),
            "RmsNorm": lambda: op(
                "RMSNormalization", inputs, axis=-1, epsilon=node.attributes["eps"].as_float(), stash_type=1
            ),
            "SplitHeads": lambda: split_heads(self.builder, inputs[0], node.attributes["heads"].as_int()),
            "Rotary": lambda: self._rotary(*inputs),
            "SwiGlu": lambda: self._swiglu(inputs[0]),
            "WriteCache": lambda: op("TensorScatter", inputs, axis=-2),
            "WriteHistory": lambda: self._write_history(*inputs),
            "Attention": lambda: self._attention(*inputs, scale=scale),
            "DraftAttention": lambda: self._draft_attention(*inputs, scale=scale),
            "TakeRows": lambda: take_rows(self.builder, *inputs),
            "Sample": lambda: lower_sample(self.builder, inputs),
        }
        return by_name[node.op_type]()

    def argmax(self, node: ir.Node) -> ir.Value:
        """The value that replaces an ArgMax over the last axis, as the trace has them."""
        (x,) = node.inputs
        assert x is not None
        assert x.shape is not None
        assert node.attributes["axis"].as_int() in (-1, len(x.shape) - 1)
        assert not node.attributes["keepdims"].as_int()
        return lower_argmax(self.builder, x)

    def _linear(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        if weight not in self._transposed:
            self._transposed[weight] = transposed(self.builder, weight, self._weights)
        return self.builder.op("MatMul", [x, self._transposed[weight]])

    def _rotary(self, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        rotated = self.builder.op("RotaryEmbedding", [self._cast(x, ir.DataType.FLOAT, x.dtype), cos, sin])
        return self._cast(rotated, x.dtype, ir.DataType.FLOAT)

    def _swiglu(self, x: ir.Value) -> ir.Value:
        gate, up = self.builder.op_with_outputs("Split", [x], 2, axis=-1, num_outputs=2)
        return self.builder.op("Mul", [self.builder.op("Swish", [gate]), up])

    def _write_history(self, history: ir.Value, tokens: ir.Value, start: ir.Value) -> ir.Value:
        """int64 caches have no in-place layer: a scatter of a few kilobytes."""
        op, const = self.builder.op, self.builder.constant
        index = op("Add", [op("Unsqueeze", [start, const([1])]), const(np.arange(static_size(tokens, 1)))])
        return op("ScatterElements", [history, index, tokens], axis=1)

    def _attention(self, q: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, *, scale: float) -> ir.Value:
        return self._attend(q, keys, values, self._mask(mask, q.dtype, 0), scale)

    def _draft_attention(
        self,
        q: ir.Value,
        keys: ir.Value,
        values: ir.Value,
        mask: ir.Value,
        new_keys: ir.Value,
        new_values: ir.Value,
        *,
        scale: float,
    ) -> ir.Value:
        op, drafted = self.builder.op, static_size(new_keys, 2)
        all_keys = op("Concat", [keys, new_keys], axis=2)
        all_values = op("Concat", [values, new_values], axis=2)
        return self._attend(q, all_keys, all_values, self._mask(mask, q.dtype, drafted), scale, of=values)

    def _attend(
        self,
        q: ir.Value,
        keys: ir.Value,
        values: ir.Value,
        mask: ir.Value,
        scale: float,
        of: ir.Value | None = None,
    ) -> ir.Value:
        attributes: dict[str, Any] = {"TRT_decomposable": 1} if q.dtype == ir.DataType.FLOAT else {}
        mixed = self.builder.op("Attention", [q, keys, values, mask], scale=scale, **attributes)
        return merge_heads(self.builder, mixed, static_size(q, 1) * static_size(of or values, 3))

    def _mask(self, mask: ir.Value, dtype: ir.DataType | None, extra: int) -> ir.Value:
        """[B, T, L] of 0 and -inf → [B, 1, T, L + extra] of the queries' type, `extra` more visible keys."""
        assert dtype is not None
        key = (mask, dtype, extra)
        if key not in self._masks:
            op, const = self.builder.op, self.builder.constant
            finite = op("Max", [mask, const(_LOWEST[dtype])])
            if extra:
                finite = op("Pad", [finite, const([0, 0, 0, 0, 0, extra])])
            typed = self._cast(finite, dtype, ir.DataType.FLOAT)
            self._masks[key] = op("Unsqueeze", [typed, const([1])])
        return self._masks[key]

    def _cast(self, x: ir.Value, to: ir.DataType | None, now: ir.DataType | None) -> ir.Value:
        return x if to == now else self.builder.op("Cast", [x], to=to)
