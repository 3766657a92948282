"""Replaces the nodes of dialect.py by what ONNX Runtime's CPU provider runs best.

There a step's caches have exactly the L positions that it looks at (runtime/caches.py): a slice of each would be a
copy of it, in every layer. On a GPU they have all S, and the graph slices them.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from .attention_lowering import AttentionLowering
from .builder import MICROSOFT, Builder
from .linear import Encoding, LinearLowering, WeightSign
from .lowering import replace_dialect, split_heads, static_size, take_rows
from .sampling_lowering import lower_sample


def lower(model: ir.Model, encoding: Encoding, weight_sign: WeightSign, *, whole_caches: bool = True) -> ir.Model:
    """The same graph, in place, in standard and com.microsoft operators. `whole_caches`: S is L in every step."""
    lowering = _Lowering(Builder(model.graph), encoding, weight_sign, whole_caches=whole_caches)
    replace_dialect(model, lowering.builder, lowering.lower)
    model.opset_imports[MICROSOFT] = 1
    return model


class _Lowering:
    def __init__(self, builder: Builder, encoding: Encoding, weight_sign: WeightSign, *, whole_caches: bool) -> None:
        self.builder = builder
        self._linear = LinearLowering(builder, encoding, weight_sign)
        self._attention = AttentionLowering(builder, whole_caches=whole_caches)

    def lower(self, node: ir.Node) -> ir.Value:
        """The value that replaces a node's output."""
        inputs = [value for value in node.inputs if value is not None]
        scale = node.attributes["scale"].as_float() if "scale" in node.attributes else 1.0
        # torch.export leaves out an argument that has its default.
        bound = node.attributes["bound"].as_float() if "bound" in node.attributes else 0.0
        by_name: dict[str, Callable[[], ir.Value]] = {
            "Linear": lambda: self._linear.lower(*inputs, bound=bound, is_head=_makes_logits(node)),
            "RmsNorm": lambda: self.builder.op(
                "RMSNormalization", inputs, axis=-1, epsilon=node.attributes["eps"].as_float()
            ),
            "SplitHeads": lambda: split_heads(self.builder, inputs[0], node.attributes["heads"].as_int()),
            "Rotary": lambda: self.builder.op("RotaryEmbedding", inputs),
            "SwiGlu": lambda: self._swiglu(*inputs),
            "WriteCache": lambda: self._attention.write(*inputs),
            "WriteHistory": lambda: self.builder.op("TensorScatter", inputs, axis=1),
            "Attention": lambda: self._attention.attend(*inputs, scale=scale),
            "DraftAttention": lambda: self._attention.attend_drafted(*inputs, scale=scale),
            "TakeRows": lambda: take_rows(self.builder, *inputs),
            "Sample": lambda: lower_sample(self.builder, inputs, static_size(inputs[0], -1)),
        }
        return by_name[node.op_type]()

    def _swiglu(self, x: ir.Value) -> ir.Value:
        gate, up = self.builder.op_with_outputs("Split", [x], 2, axis=-1, num_outputs=2)
        silu = self.builder.op("QuickGelu", [gate], domain=MICROSOFT, alpha=1.0)
        return self.builder.op("Mul", [silu, up])


def _makes_logits(node: ir.Node) -> bool:
    """Whether tokens are chosen by what the node computes."""
    (output,) = node.outputs
    return output.is_graph_output() or any(user.op_type in ("Sample", "ArgMax") for user, _ in output.uses())
