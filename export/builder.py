"""Adding nodes to a graph, with constants shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .weights import static_shape

MICROSOFT = "com.microsoft"


class Builder:
    """Collects nodes to be inserted in a graph; constants become the graph's initializers, each value once."""

    def __init__(self, graph: ir.Graph, prefix: str = "lowered") -> None:
        self.graph, self._prefix = graph, prefix
        self._tape = ir.tape.Tape()
        self._adopted: list[ir.Node] = []
        self._count = 0
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(self, name: str, inputs: Sequence[ir.Value | None], domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node → its output."""
        return self.op_with_outputs(name, inputs, 1, domain, **attributes)[0]

    def op_with_outputs(
        self, name: str, inputs: Sequence[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Adds a node → its outputs."""
        values = self._tape.op_multi_out(name, inputs, attributes, num_outputs=outputs, domain=domain)
        for value in values:  # names must differ across an If's branches too, which onnx-ir names apart
            value.name = f"{self._prefix}_{self._count}"
            self._count += 1
        return values

    def constant(self, value: NDArray[Any] | float | Sequence[int], dtype: Any = None) -> ir.Value:
        """An initializer holding `value`: int64 for ints, float32 for floats, unless dtype says otherwise."""
        array = np.asarray(value, dtype)
        if dtype is None and array.dtype.kind in "if":
            array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.initializer(f"{self._prefix}_const_{len(self._constants)}", ir.tensor(array))
        return self._constants[key]

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A new initializer of the graph."""
        value = ir.Value(
            name=name,
            shape=ir.Shape(static_shape(tensor)),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def take_nodes(self) -> list[ir.Node]:
        """The nodes added since the last call."""
        nodes, self._tape = [*self._adopted, *self._tape.nodes], ir.tape.Tape()
        self._adopted = []
        return nodes

    def adopt(self, nodes: Sequence[ir.Node]) -> None:
        """Puts nodes taken before in front of those added from now on."""
        assert not self._tape.nodes, "take the nodes of a branch before adopting others"
        self._adopted = list(nodes)

    def branch(self, name: str, outputs: Sequence[ir.Value], nodes: Sequence[ir.Node]) -> ir.Graph:
        """A graph without inputs for an If: it reads the surrounding graph's values."""
        return ir.Graph([], outputs, nodes=nodes, name=name)
