"""Draft steps of a graph of a few nodes that run where they are asked for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graphs import Array, constant, float32, model_of, run, typed, value_of

from graphspec.export.drafting import NUM_DRAFTS, draft_on_demand

SIZE = 16
X = float32(0, 2, 1, SIZE)
WEIGHT = float32(1, SIZE, SIZE)
PENDING = np.array([[7], [8]])
FEEDS: dict[str, Array] = {"x": X, "pending": PENDING}


def chain(weight: Array) -> ir.Model:
    """x → h_1 = x W → h_2 = h_1 W → h_3; drafts are where each is largest, and the state is h_1 + 0.

    The state needs the first product, so that only its argmax is a draft's alone.
    """
    x, pending, w, zero = (
        value_of("x", X, dynamic=True),
        value_of("pending", PENDING, dynamic=True),
        constant("w", weight),
        constant("zero", np.zeros((), np.float32)),
    )
    nodes, drafts, hidden, first = list[ir.Node](), list[ir.Value](), x, x
    for step in range(3):
        product = ir.node("MatMul", [hidden, w])
        best = ir.node("ArgMax", [product.outputs[0]], {"axis": -1, "keepdims": 0})
        hidden = typed(product.outputs[0], f"h{step}", X)
        first = hidden if step == 0 else first
        drafts.append(typed(best.outputs[0], f"d{step}", PENDING))
        drafts[-1].shape = ir.Shape(["batch", 1])
        nodes += [product, best]
    state = ir.node("Add", [first, zero])
    proposed = ir.node("Concat", drafts, {"axis": 1})
    joined = ir.node("Concat", [pending, proposed.outputs[0]], {"axis": 1})
    typed(proposed.outputs[0], "proposed", np.zeros((2, 3), np.int64))
    outputs = [
        typed(joined.outputs[0], "next_tokens", np.zeros((2, 4), np.int64)),
        typed(state.outputs[0], "state.next", X),
    ]
    return model_of([x, pending], [*nodes, state, proposed, joined], outputs, [w, zero])


def with_a_branch_of_its_own() -> ir.Model:
    """Its second draft is chosen inside an If, which reads what only that draft needs; its third is the second again,
    and its fourth what the state holds too."""
    x, pending = value_of("x", X, dynamic=True), value_of("pending", PENDING, dynamic=True)
    w, yes = constant("w", WEIGHT), constant("yes", np.array(True))
    shared, negated = ir.node("MatMul", [x, w]), ir.node("Neg", [x])
    first = ir.node("ArgMax", [typed(shared.outputs[0], "shared", X)], {"axis": -1, "keepdims": 0})
    own = ir.node("MatMul", [typed(negated.outputs[0], "minus", X), w])
    typed(own.outputs[0], "own", X)
    chosen = ir.node("ArgMax", [own.outputs[0]], {"axis": -1, "keepdims": 0})
    other = ir.node("ArgMin", [own.outputs[0]], {"axis": -1, "keepdims": 0})
    branches = {
        name: ir.Graph([], [typed(node.outputs[0], f"inside_{name}", PENDING)], nodes=[node], name=name)
        for name, node in (("then_branch", chosen), ("else_branch", other))
    }
    second = ir.node("If", [yes], branches)
    held = ir.node("ArgMin", [x], {"axis": -1, "keepdims": 0})
    drafts = [first.outputs[0], second.outputs[0], second.outputs[0], held.outputs[0]]
    for name, value in zip("abbc", drafts, strict=True):
        typed(value, name, PENDING).shape = ir.Shape(["batch", 1])
    proposed = ir.node("Concat", drafts, {"axis": 1})
    typed(proposed.outputs[0], "proposed", np.zeros((2, 4), np.int64))
    joined = ir.node("Concat", [pending, proposed.outputs[0]], {"axis": 1})
    state = ir.node("Identity", [held.outputs[0]])
    outputs = [
        typed(joined.outputs[0], "next_tokens", np.zeros((2, 5), np.int64)),
        typed(state.outputs[0], "state.next", PENDING),
    ]
    nodes = [shared, first, negated, own, second, held, proposed, joined, state]
    return model_of([x, pending], nodes, outputs, [w, yes])


def on_demand() -> ir.Model:
    model = chain(WEIGHT)
    draft_on_demand(model)
    return model


@pytest.mark.parametrize("num_drafts", range(4))
def test_drafts_that_are_not_asked_for_are_none_and_nothing_else_changes(num_drafts: int) -> None:
    tokens, state = run(chain(WEIGHT), FEEDS)
    found, state_then = run(on_demand(), {**FEEDS, NUM_DRAFTS: np.array(num_drafts)})
    expected = tokens.copy()
    expected[:, 1 + num_drafts :] = -1
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(state_then, state)


def test_products_of_drafts_alone_are_in_branches_of_the_graph_and_in_none_of_a_branch() -> None:
    graph = on_demand().graph
    assert [node.op_type for node in graph].count("MatMul") == 1, "the state's"
    inside = [
        [node.op_type for node in node.attributes["then_branch"].as_graph()] for node in graph if node.op_type == "If"
    ]
    assert inside == [["ArgMax"], ["MatMul", "ArgMax"], ["MatMul", "ArgMax"]]


def test_a_drafter_without_weights_is_left_as_it_is() -> None:
    """A lookup costs less than the branch."""
    model = chain(np.eye(2, dtype=np.float32))
    before = [node.op_type for node in model.graph]
    draft_on_demand(model)
    assert [node.op_type for node in model.graph] == before
    assert NUM_DRAFTS not in [value.name for value in model.graph.inputs]


@pytest.mark.parametrize("num_drafts", range(5))
def test_a_drafter_may_be_made_in_any_way(num_drafts: int) -> None:
    """What is proposed twice, or kept as well, is there whoever asks."""
    tokens, state = run(with_a_branch_of_its_own(), FEEDS)
    model = with_a_branch_of_its_own()
    draft_on_demand(model)
    found, state_then = run(model, {**FEEDS, NUM_DRAFTS: np.array(num_drafts)})
    np.testing.assert_array_equal(found[:, : 1 + num_drafts], tokens[:, : 1 + num_drafts])
    np.testing.assert_array_equal(state_then, state)
    assert (found[:, 1:3] == -1).all() == (num_drafts == 0)
    assert (found[:, 4] == tokens[:, 4]).all()
