"""Graphs of a few nodes, and ONNX Runtime to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from stepping import session

from graphspec.export.builder import MICROSOFT
from graphspec.export.dialect import DOMAIN

Array = NDArray[Any]


def value_of(name: str, array: Array, *, dynamic: bool = False) -> ir.Value:
    """A graph input like the array; with `dynamic`, its first dimension has a name."""
    shape: list[int | str] = list(array.shape)
    if dynamic and shape:
        shape[0] = "batch"
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))


def constant(name: str, array: Array) -> ir.Value:
    """An initializer."""
    return ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.tensor(array, name=name),
    )


def typed(value: ir.Value, name: str, like: Array) -> ir.Value:
    """The value, named, with the array's type and shape: what a trace knows of every value."""
    value.name, value.shape = name, ir.Shape(like.shape)
    value.type = ir.TensorType(ir.DataType.from_numpy(like.dtype))
    return value


def model_of(
    inputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    outputs: Sequence[ir.Value],
    initializers: Sequence[ir.Value] = (),
) -> ir.Model:
    """A model of the project's opset."""
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 24, MICROSOFT: 1, DOMAIN: 1},
        name="test",
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, feeds: Mapping[str, Array], *, optimise: bool = False) -> list[Array]:
    """The model's outputs; weights must be inside it."""
    model.opset_imports.pop(DOMAIN, None)
    outputs: list[Array] = session(model, Path("."), optimise=optimise).run(None, dict(feeds))
    return outputs


def float32(seed: int, *shape: int) -> NDArray[np.float32]:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
