"""One graph per verify width, from the traced one: TensorRT wants every size known when it compiles.

The traced graph takes its widths from the sizes of its inputs. Fixing them gives the step of design §4: it
reads the first W+1 columns of the K+1 carried tokens, and asks nothing of the host that it does not need.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .builder import Builder


def specialise(model: ir.Model, *, width: int, num_draft_tokens: int, capacity: int) -> ir.Model:
    """A copy that verifies `width` drafts in every row; the batch stays symbolic. Weights are shared."""
    clone = model.clone()
    graph = clone.graph
    builder = Builder(graph, prefix="fixed")
    inputs = {str(value.name): value for value in graph.inputs}
    first = next(iter(graph))
    carried = ir.Value(
        name="tokens", shape=ir.Shape(["batch", num_draft_tokens + 1]), type=ir.TensorType(ir.DataType.INT64)
    )
    const = builder.constant
    read = builder.op("Slice", [carried, const([0]), const([width + 1]), const([1])])
    rows = builder.op("Shape", [inputs["kv_len"]])
    replacements = {
        "tokens": read,
        "verify_offsets": const(np.arange(width + 1)),
        "key_positions": const(np.arange(capacity)),
        "n_tokens": builder.op("Expand", [const([width + 1]), rows]),
        "n_known": builder.op("Expand", [const([1]), rows]),
        "next_token": builder.op("Expand", [const([-1]), rows]),
    }
    for name, value in replacements.items():
        value.type, value.shape = inputs[name].type, inputs[name].shape
        ir.convenience.replace_all_uses_with(inputs[name], value)
        graph.inputs.remove(inputs[name])
    graph.inputs.insert(0, carried)
    graph.insert_before(first, builder.take_nodes())
    sizes = {"tokens": width + 1, "verified": width + 1, "visible": capacity, "capacity": capacity}
    _fix_sizes(graph, {**sizes, "tokens + 1": width + 2})
    return clone


def _fix_sizes(graph: ir.Graph, sizes: Mapping[str, int]) -> None:
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim.value) for dim in value.shape]
            )
