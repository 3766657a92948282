"""Draft steps that run only where somebody will verify what they propose.

    next_tokens = [ y | d_1 | d_2 | … ]
                         │     └ If(num_drafts > 1): what only d_2 and later drafts need      else: -1
                         └ If(num_drafts > 0): what only drafts need                          else: -1

One If behind the other, none in another: ONNX Runtime packs the weights of a branch, and not those of a branch's
branch. A head that runs once for each draft adds a twentieth to a small target's step each time: a step that verifies
two drafts has no use for a third. What the caches need is never skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .builder import Builder

NUM_DRAFTS = "num_drafts"
"""i64[]: drafts to propose; those from there on are -1."""
_NO_DRAFT = -1
_WEIGHT = 1024
"""Bytes from which on a constant is a weight."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Drafts that are computed together."""

    tokens: ir.Value
    """i64[B, c]."""
    nodes: tuple[ir.Node, ...]
    """What only they and later drafts need; none where they are kept, or drafted before, as well."""

    @property
    def columns(self) -> int:
        """c."""
        assert self.tokens.shape is not None
        columns = self.tokens.shape[1]
        assert isinstance(columns, int)
        return columns


def draft_on_demand(model: ir.Model) -> None:
    """Adds the input `num_drafts`, in place; a graph that drafts nothing, or without weights, stays as it is."""
    graph = model.graph
    joined = next((value.producer() for value in graph.outputs if value.name == "next_tokens"), None)
    if joined is None:
        return
    pending, proposed = joined.inputs
    assert pending is not None
    assert proposed is not None
    parts = _parts(graph, pending, proposed)
    if not any(_reads_weights(part.nodes) for part in parts):
        return
    ir.passes.common.ShapeInferencePass()(model)  # an If has to know the types of what its branches leave
    asked = ir.Value(name=NUM_DRAFTS, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(asked)
    builder, first = Builder(graph, prefix="drafting"), 0
    for part in parts:
        if part.nodes:  # else it costs nothing
            wanted = builder.op("Greater", [asked, builder.constant(first, "int64")])
            _branch(builder, part, pending, wanted)
        first += part.columns
    graph.extend(builder.take_nodes())
    graph.sort()
    ir.passes.common.RemoveUnusedNodesPass()(model)  # what joined the drafts before


def _parts(graph: ir.Graph, pending: ir.Value, proposed: ir.Value) -> list[_Part]:
    """In the order of the drafts. What several need belongs to the first of them."""
    rest = [value for value in graph.outputs if value.name != "next_tokens"]
    known = _needed([*rest, pending], frozenset())
    found = []
    for tokens in _columns(proposed):
        new = _needed([tokens], known)
        found.append(_Part(tokens, tuple(node for node in graph if node in new)))
        known |= new
    return found


def _columns(value: ir.Value) -> Iterator[ir.Value]:
    """What a tensor i64[B, K] is put together of."""
    node = value.producer()
    if node is not None and node.op_type == "Concat":
        for part in node.inputs:
            assert part is not None
            yield from _columns(part)
    else:
        yield value


def _needed(values: Iterable[ir.Value], known: frozenset[ir.Node]) -> frozenset[ir.Node]:
    """The nodes that compute the values, without those known."""
    found = set[ir.Node]()
    waiting = list(values)
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in known or node in found:
            continue
        found.add(node)
        waiting += _read(node)
    return frozenset(found)


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """A node's inputs, and what its branches read of the graph around them."""
    for each in _with_branches([node]):
        yield from (value for value in each.inputs if value is not None)


def _with_branches(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """The nodes, and those of their branches."""
    for node in nodes:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _with_branches(attribute.as_graph())


def _reads_weights(nodes: Iterable[ir.Node]) -> bool:
    constants = (value.const_value for node in _with_branches(nodes) for value in node.inputs if value is not None)
    return any(constant is not None and constant.nbytes >= _WEIGHT for constant in constants)


def _branch(builder: Builder, part: _Part, pending: ir.Value, wanted: ir.Value) -> None:
    """Runs the nodes of the part only where they are wanted."""
    inside = frozenset(_with_branches(part.nodes))
    left = [value for node in part.nodes for value in node.outputs if not inside.issuperset(value.consumers())]
    outside = builder.take_nodes()

    nothing = [_no_drafts(builder, part, pending) if value is part.tokens else _empty(builder, value) for value in left]
    skipped = builder.branch(f"no_{part.tokens.name}", nothing, builder.take_nodes())

    builder.graph.remove(part.nodes, safe=False)
    drafted = builder.branch(f"for_{part.tokens.name}", left, part.nodes)

    builder.adopt(outside)
    results = builder.op_with_outputs("If", [wanted], len(left), then_branch=drafted, else_branch=skipped)
    for value, result in zip(left, results, strict=True):
        result.type, result.shape = value.type, value.shape
        for user, index in value.uses():
            if user not in inside:
                user.replace_input_with(index, result)


def _no_drafts(builder: Builder, part: _Part, pending: ir.Value) -> ir.Value:
    """i64[B, c] of what is no token."""
    rows = builder.op("Shape", [pending], start=0, end=1)
    sizes = builder.op("Concat", [rows, builder.constant([part.columns])], axis=0)
    return builder.op("Expand", [builder.constant(_NO_DRAFT, "int64"), sizes])


def _empty(builder: Builder, value: ir.Value) -> ir.Value:
    """A tensor of the same type, of no size: what would read it is not run either."""
    assert value.dtype is not None, value
    assert value.shape is not None, value
    nothing = np.zeros([0] * len(value.shape), value.dtype.numpy())
    return builder.op("Identity", [builder.constant(nothing, nothing.dtype)])
