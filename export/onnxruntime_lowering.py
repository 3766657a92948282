"""Replaces the nodes of dialect.py by what ONNX Runtime's CPU provider runs best."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from .attention_lowering import AttentionLowering
from .builder import MICROSOFT, Builder
from .dialect import DOMAIN
from .linear import Encoding, LinearLowering, WeightSign
from .sampling_lowering import lower_sample


def lower(model: ir.Model, encoding: Encoding, weight_sign: WeightSign) -> ir.Model:
    """The same graph, in place, in standard and com.microsoft operators."""
    graph = model.graph
    lowering = _Lowering(Builder(graph), encoding, weight_sign)
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        old = node.outputs[0]
        new = lowering.lower(node)
        nodes = lowering.builder.take_nodes()
        new.name, new.type, new.shape = old.name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        graph.insert_before(node, nodes)
        graph.remove(node, safe=True)
    model.opset_imports[MICROSOFT] = 1
    model.opset_imports.pop(DOMAIN, None)
    return model


class _Lowering:
    def __init__(self, builder: Builder, encoding: Encoding, weight_sign: WeightSign) -> None:
        self.builder = builder
        self._linear = LinearLowering(builder, encoding, weight_sign)
        self._attention = AttentionLowering(builder)

    def lower(self, node: ir.Node) -> ir.Value:
        """The value that replaces a node's output."""
        inputs = [value for value in node.inputs if value is not None]
        scale = node.attributes["scale"].as_float() if "scale" in node.attributes else 1.0
        by_name: dict[str, Callable[[], ir.Value]] = {
            "Linear": lambda: self._linear.lower(*inputs),
            "RmsNorm": lambda: self.builder.op(
                "RMSNormalization", inputs, axis=-1, epsilon=node.attributes["eps"].as_float()
            ),
            "SplitHeads": lambda: self._attention.split_heads(inputs[0], node.attributes["heads"].as_int()),
            "Rotary": lambda: self.builder.op("RotaryEmbedding", inputs),
            "SwiGlu": lambda: self._swiglu(*inputs),
            "WriteCache": lambda: self._attention.write(*inputs),
            "WriteHistory": lambda: self.builder.op("TensorScatter", inputs, axis=1),
            "Attention": lambda: self._attention.attend(*inputs, scale=scale),
            "DraftAttention": lambda: self._attention.attend_drafted(*inputs, scale=scale),
            "TakeRows": lambda: self._take_rows(*inputs),
            "Sample": lambda: lower_sample(self.builder, inputs, _last_dim(inputs[0])),
        }
        return by_name[node.op_type]()

    def _swiglu(self, x: ir.Value) -> ir.Value:
        gate, up = self.builder.op_with_outputs("Split", [x], 2, axis=-1, num_outputs=2)
        silu = self.builder.op("QuickGelu", [gate], domain=MICROSOFT, alpha=1.0)
        return self.builder.op("Mul", [silu, up])

    def _take_rows(self, x: ir.Value, rows: ir.Value) -> ir.Value:
        indices = self.builder.op("Unsqueeze", [rows, self.builder.constant([-1])])
        return self.builder.op("GatherND", [x, indices], batch_dims=1)


def _last_dim(value: ir.Value) -> int:
    assert value.shape is not None
    size = value.shape[-1]
    assert isinstance(size, int)
    return size
