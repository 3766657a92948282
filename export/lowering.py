"""What the lowerings of all backends share."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from .builder import Builder
from .dialect import DOMAIN


def replace_dialect(model: ir.Model, builder: Builder, lower: Callable[[ir.Node], ir.Value]) -> None:
    """Replaces every node of dialect.py, in place, by the nodes that `lower` adds to the builder for it."""
    graph = model.graph
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        replace_node(model, builder, node, lower(node))
    model.opset_imports.pop(DOMAIN, None)


def replace_node(model: ir.Model, builder: Builder, node: ir.Node, new: ir.Value) -> None:
    """What read the node's output reads `new` from now on, which the nodes added to the builder compute."""
    old = node.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    model.graph.insert_before(node, builder.take_nodes())
    model.graph.remove(node, safe=True)


def split_heads(builder: Builder, x: ir.Value, heads: int) -> ir.Value:
    """[B, T, heads · D] → [B, heads, T, D]."""
    shaped = builder.op("Reshape", [x, builder.constant([0, 0, heads, -1])])
    return builder.op("Transpose", [shaped], perm=[0, 2, 1, 3])


def merge_heads(builder: Builder, x: ir.Value, width: int) -> ir.Value:
    """[B, heads, T, D] → [B, T, heads · D = width]."""
    moved = builder.op("Transpose", [x], perm=[0, 2, 1, 3])
    return builder.op("Reshape", [moved, builder.constant([0, 0, width])])


def take_rows(builder: Builder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """x [B, T, …] at rows i64[B, R] → [B, R, …]."""
    return builder.op("GatherND", [x, builder.op("Unsqueeze", [rows, builder.constant([-1])])], batch_dims=1)


def static_size(value: ir.Value, axis: int) -> int:
    """A size that the graph fixes."""
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size
