"""Fusions on a lowered graph."""

from __future__ import annotations

import onnx_ir as ir

from .builder import MICROSOFT


def fuse_residual_norms(model: ir.Model) -> None:
    """x + y followed by RMSNormalization becomes SkipSimplifiedLayerNormalization: one pass over memory.

    The sum stays available as the node's fourth output, exactly. The norm may differ in its last bit: the fused kernel
    adds up the squares in another order.
    """
    for node in list(model.graph):
        if node.op_type != "RMSNormalization" or not _is_residual(node.inputs[0]):
            continue
        total = node.inputs[0]
        assert total is not None
        add = total.producer()
        assert add is not None
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, node.inputs[1]],
            {"epsilon": node.attributes["epsilon"].as_float()},
            domain=MICROSOFT,
            num_outputs=4,
        )
        normed, _, _, new_total = fused.outputs
        for unused in fused.outputs[1:3]:
            unused.name = ""
        for new, old in ((normed, node.outputs[0]), (new_total, total)):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        model.graph.insert_before(add, [fused])
        model.graph.remove([node, add], safe=True)


def _is_residual(value: ir.Value | None) -> bool:
    """Whether the value is the sum of two computed tensors of the same shape, normed once."""
    add = value.producer() if value is not None else None
    if value is None or add is None or add.op_type != "Add" or value.is_graph_output():
        return False
    left, right = add.inputs
    if left is None or right is None or left.const_value is not None or right.const_value is not None:
        return False
    norms = [node for node, index in value.uses() if node.op_type == "RMSNormalization" and index == 0]
    return len(norms) == 1 and left.shape is not None and left.shape == right.shape
