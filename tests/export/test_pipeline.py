"""Each pass on a graph of a few nodes: the outputs before and after agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graphs import Array, constant, float32, model_of, run, typed, value_of
from numpy.typing import NDArray

from graphspec.export import pipeline
from graphspec.export.builder import MICROSOFT
from graphspec.export.dialect import DOMAIN
from graphspec.export.fusion import fuse_residual_norms
from graphspec.export.linear import Encoding

ROWS = float32(0, 2, 3, 16)
OTHER = float32(1, 2, 3, 16)
NORM = float32(2, 16)
EPS = {"axis": -1, "epsilon": 1e-5}
Feeds = dict[str, Array]


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def arithmetic() -> tuple[ir.Model, Feeds]:
    """(x · 2 + 3) beside (x · 2) and a node nobody reads; 2 is computed from constants."""
    x = value_of("x", ROWS, dynamic=True)
    one, three, spare = (
        constant(name, np.array(n, np.float32)) for name, n in (("one", 1), ("three", 3), ("spare", 9))
    )
    two = ir.node("Add", [one, one])
    double, again = ir.node("Mul", [x, two.outputs[0]]), ir.node("Mul", [x, two.outputs[0]])
    result = ir.node("Add", [double.outputs[0], three])
    unread = ir.node("Neg", [again.outputs[0]])
    for index, node in enumerate((two, double, again, unread)):
        typed(node.outputs[0], f"v{index}", ROWS if node is not two else np.array(0, np.float32))
    outputs = [typed(result.outputs[0], "y", ROWS)]
    last = ir.node("Sub", [result.outputs[0], again.outputs[0]])
    outputs.append(typed(last.outputs[0], "z", ROWS))
    return model_of([x], [two, double, again, result, unread, last], outputs, [one, three, spare]), {"x": ROWS}


def residual(*, read_twice: bool) -> tuple[ir.Model, Feeds]:
    """norm(a · b + b), and what else reads the sum."""
    a, b, weight = value_of("a", ROWS, dynamic=True), value_of("b", OTHER, dynamic=True), constant("norm", NORM)
    product = ir.node("Mul", [a, b])
    total = ir.node("Add", [typed(product.outputs[0], "product", ROWS), b])
    product.outputs[0].shape = b.shape
    normed = ir.node("RMSNormalization", [typed(total.outputs[0], "total", ROWS), weight], EPS)
    nodes, outputs = [product, total, normed], [typed(normed.outputs[0], "normed", ROWS)]
    if read_twice:
        nodes.append(ir.node("Neg", [total.outputs[0]]))
        outputs.append(typed(nodes[-1].outputs[0], "negated", ROWS))
    return model_of([a, b], nodes, outputs, [weight]), {"a": ROWS, "b": OTHER}


def dialect() -> tuple[ir.Model, Feeds]:
    """A projection of normed rows: two nodes of the dialect."""
    x, norm, matrix = value_of("x", ROWS, dynamic=True), constant("norm", NORM), constant("m", float32(3, 8, 16))
    first = ir.node("RmsNorm", [x, norm], {"eps": 1e-5}, domain=DOMAIN)
    second = ir.node("Linear", [typed(first.outputs[0], "normed", ROWS), matrix], domain=DOMAIN)
    output = typed(second.outputs[0], "y", np.zeros((2, 3, 8), np.float32))
    return model_of([x], [first, second], [output], [norm, matrix]), {"x": ROWS}


def same(
    run_pass: Callable[[ir.Model], object], made: tuple[ir.Model, Feeds], *, rounded: tuple[str, ...] = ()
) -> ir.Model:
    """Runs the pass and checks that the model computes the same bits as before; for `rounded` outputs, all but the
    last ones."""
    model, feeds = made
    names = [value.name for value in model.graph.outputs]
    before = run(model.clone(), feeds)
    run_pass(model)
    after = run(model.clone(), feeds)
    assert [value.name for value in model.graph.outputs] == names
    for name, old, new in zip(names, before, after, strict=True):
        np.testing.assert_allclose(new, old, rtol=5e-7 if name in rounded else 0, atol=0)
    return model


def test_constants_are_folded() -> None:
    model = same(pipeline.fold_constants, arithmetic())
    assert kinds(model).count("Add") == 1


def test_large_weights_are_not_folded() -> None:
    rows, large = float32(0, 2, 2000), float32(1, 2000)
    x, weight = value_of("x", rows, dynamic=True), constant("weight", large)
    doubled = ir.node("Add", [weight, weight])
    result = ir.node("Mul", [x, typed(doubled.outputs[0], "doubled", large)])
    graph = model_of([x], [doubled, result], [typed(result.outputs[0], "y", rows)], [weight])
    model = same(pipeline.fold_constants, (graph, {"x": rows}))
    assert kinds(model) == ["Add", "Mul"]


def test_equal_expressions_are_computed_once() -> None:
    assert kinds(same(pipeline.share_subexpressions, arithmetic())).count("Mul") == 1


def test_nodes_and_initializers_that_nobody_reads_go() -> None:
    model = same(pipeline.remove_unused, arithmetic())
    assert "Neg" not in kinds(model)
    assert "spare" not in model.graph.initializers


@pytest.mark.parametrize("read_twice", [True, False])
def test_a_residual_and_its_norm_become_one_node(read_twice: bool) -> None:
    model = same(fuse_residual_norms, residual(read_twice=read_twice), rounded=("normed",))
    assert kinds(model).count("SkipSimplifiedLayerNormalization") == 1
    assert "RMSNormalization" not in kinds(model)


def norm_of_embedding() -> tuple[ir.Model, Feeds]:
    """norm(x): no sum in front of it."""
    x, weight = value_of("x", ROWS), constant("norm", NORM)
    normed = ir.node("RMSNormalization", [x, weight], EPS)
    return model_of([x], [normed], [typed(normed.outputs[0], "y", ROWS)], [weight]), {"x": ROWS}


def norm_of_bias() -> tuple[ir.Model, Feeds]:
    """norm(x + bias): the sum of a tensor and a vector."""
    x, bias, weight = value_of("x", ROWS), constant("bias", float32(3, 16)), constant("norm", NORM)
    total = ir.node("Add", [x, bias])
    normed = ir.node("RMSNormalization", [typed(total.outputs[0], "total", ROWS), weight], EPS)
    return model_of([x], [total, normed], [typed(normed.outputs[0], "y", ROWS)], [bias, weight]), {"x": ROWS}


def norm_of_broadcast() -> tuple[ir.Model, Feeds]:
    """norm(x + y) where y has another shape."""
    x, y, weight = value_of("x", ROWS), value_of("other", float32(3, 1, 16)), constant("norm", NORM)
    total = ir.node("Add", [x, y])
    normed = ir.node("RMSNormalization", [typed(total.outputs[0], "total", ROWS), weight], EPS)
    feeds = {"x": ROWS, "other": float32(3, 1, 16)}
    return model_of([x, y], [total, normed], [typed(normed.outputs[0], "y", ROWS)], [weight]), feeds


def sum_that_is_an_output() -> tuple[ir.Model, Feeds]:
    model, feeds = residual(read_twice=False)
    (total,) = (node.outputs[0] for node in model.graph if node.op_type == "Add")
    model.graph.outputs.append(total)
    return model, feeds


def sum_normed_twice() -> tuple[ir.Model, Feeds]:
    """EAGLE-3 norms a target's hidden state that the target norms too."""
    model, feeds = residual(read_twice=False)
    (total,) = (node.outputs[0] for node in model.graph if node.op_type == "Add")
    second = constant("second", float32(4, 16))
    model.graph.register_initializer(second)
    node = ir.node("RMSNormalization", [total, second], EPS)
    model.graph.append(node)
    model.graph.outputs.append(typed(node.outputs[0], "again", ROWS))
    return model, feeds


@pytest.mark.parametrize(
    "make", [norm_of_embedding, norm_of_bias, norm_of_broadcast, sum_that_is_an_output, sum_normed_twice]
)
def test_other_norms_stay_as_they_are(make: Callable[[], tuple[ir.Model, Feeds]]) -> None:
    made = make()
    before = kinds(made[0])
    assert kinds(same(fuse_residual_norms, made)) == before


def by_hand(x: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * NORM
    result: NDArray[np.float64] = normed @ float32(3, 8, 16).T.astype(np.float64)
    return result


@pytest.mark.parametrize(
    ("encoding", "bound"), [("float32", 1e-5), ("int8", 0.03)], ids=["float32, to rounding", "int8, to 3 %"]
)
def test_the_whole_pipeline_keeps_what_a_graph_computes(encoding: Encoding, bound: float) -> None:
    model, feeds = dialect()
    passes = (*pipeline.PORTABLE, *pipeline.onnxruntime(encoding, "uint8"))
    seen: list[str] = []
    pipeline.run_passes(model, passes, on_pass=seen.append)
    assert seen == [step.name for step in passes]
    assert {node.domain for node in model.graph} <= {"", MICROSOFT}
    (result,) = run(model, feeds)
    expected = by_hand(ROWS)
    assert np.abs(result - expected).max() <= bound * np.abs(expected).max()


def test_every_pass_of_the_cpu_pipeline_is_tested_here() -> None:
    """A new pass comes with its test."""
    names = {step.name for step in (*pipeline.PORTABLE, *pipeline.onnxruntime("int8", "uint8"))}
    assert names == {
        "fold_constants",
        "share_subexpressions",
        "remove_unused",
        "lower",  # test_onnxruntime_lowering.py
        "share_lowered",
        "fuse_residual_norms",
        "draft_on_demand",  # test_drafting.py
    }


def test_the_graph_after_each_pass_is_written_without_large_weights(tmp_path: Path) -> None:
    model, feeds = dialect()
    big = constant("m", float32(3, 80, 16))
    model.graph.initializers["m"].const_value = big.const_value
    passes = (*pipeline.PORTABLE, *pipeline.onnxruntime("float32", "uint8"))
    pipeline.run_passes(model, passes, on_pass=lambda _: None, dump=tmp_path / "passes", start=4)
    files = sorted(path.name for path in (tmp_path / "passes").iterdir())
    assert files == [f"{number:02}_{step.name}.onnx" for number, step in enumerate(passes, start=4)]
    first = ir.load(tmp_path / "passes" / files[0])
    assert [value.name for value in first.graph.inputs] == ["x", "m"]
    assert first.graph.initializers["norm"].const_value is not None
    assert model.graph.initializers["m.transposed"].const_value is not None
    assert list(feeds) == ["x"]
