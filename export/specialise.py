"""One graph per verify width, from the traced one: TensorRT wants every size known when it compiles.

The traced graph takes its widths from the sizes of its inputs. Fixing them gives the step of design §4: it
reads the first W+1 columns of the K+1 carried tokens, and asks nothing of the host that it does not need. A row
that is not `active` is computed, as every row of a graph of fixed size is, and keeps its tokens and its length:
what was written to its caches lies beyond that length.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .builder import Builder


def specialise_step(
    model: ir.Model, *, width: int, num_draft_tokens: int, capacity: int, batch: int | None = None
) -> ir.Model:
    """A copy that verifies `width` drafts in every row; batch None stays symbolic. Weights are shared."""
    fixed = _Fixing(model, batch)
    const = fixed.builder.constant
    carried = fixed.new_input("tokens", num_draft_tokens + 1)
    read = fixed.builder.op("Slice", [carried, const([0]), const([width + 1]), const([1])])
    rows = fixed.builder.op("Shape", [fixed.inputs["kv_len"]])
    fixed.replace("tokens", read)
    for name, value in (("n_tokens", width + 1), ("n_known", 1), ("next_token", -1)):
        fixed.replace(name, fixed.builder.op("Expand", [const([value]), rows]))
    fixed.keep_inactive({"next_tokens": carried, "next_kv_len": fixed.inputs["kv_len"]})
    return fixed.finish(tokens=width + 1, verified=width + 1, capacity=capacity)


def specialise_prefill(model: ir.Model, *, chunk: int, capacity: int, batch: int = 1) -> ir.Model:
    """A copy that reads up to `chunk` prompt tokens of each row (design §4): tokens, n_tokens, next_token."""
    fixed = _Fixing(model, batch)
    fixed.replace("tokens", fixed.new_input("tokens", chunk))
    fixed.replace("n_known", fixed.inputs["n_tokens"])
    return fixed.finish(tokens=chunk, verified=1, capacity=capacity)


class _Fixing:
    """A copy of a traced graph whose inputs are being replaced by what they are known to be."""

    def __init__(self, model: ir.Model, batch: int | None) -> None:
        self._model = model.clone()
        self._graph = self._model.graph
        for value in [value for value in self._graph.outputs if value.name == "logits"]:
            self._graph.outputs.remove(value)  # megabytes that an engine would write at every step
        self._batch: int | str = "batch" if batch is None else batch
        self._first = next(iter(self._graph))
        self.builder = Builder(self._graph, prefix="fixed")
        self.inputs = {str(value.name): value for value in self._graph.inputs}

    def new_input(self, name: str, size: int) -> ir.Value:
        """An input i64[batch, size] in place of the one of that name."""
        value = ir.Value(name=name, shape=ir.Shape([self._batch, size]), type=ir.TensorType(ir.DataType.INT64))
        self._graph.inputs.insert(0, value)
        return value

    def replace(self, name: str, value: ir.Value) -> None:
        """What read the input reads `value` from now on."""
        old = self.inputs[name]
        if value.shape is None:
            value.type, value.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, value)
        self._graph.inputs.remove(old)

    def keep_inactive(self, old: Mapping[str, ir.Value]) -> None:
        """Adds the input active bool[batch]: where it is false, the outputs named keep the values given."""
        active = ir.Value(name="active", shape=ir.Shape([self._batch]), type=ir.TensorType(ir.DataType.BOOL))
        self._graph.inputs.insert(2, active)
        for index, output in enumerate(self._graph.outputs):
            if (before := old.get(str(output.name))) is None:
                continue
            builder = Builder(self._graph, prefix=f"kept_{output.name}")
            assert output.shape is not None
            mask = active if len(output.shape) == 1 else builder.op("Unsqueeze", [active, builder.constant([1])])
            kept = builder.op("Where", [mask, output, before])
            kept.type, kept.shape, name = output.type, output.shape, output.name
            output.name, kept.name = f"{name}.active", name
            self._graph.outputs[index] = kept
            self._graph.extend(builder.take_nodes())

    def finish(self, *, tokens: int, verified: int, capacity: int) -> ir.Model:
        """Fixes the remaining sizes."""
        self.replace("verify_offsets", self.builder.constant(np.arange(verified)))
        self.replace("key_positions", self.builder.constant(np.arange(capacity)))
        self._graph.insert_before(self._first, self.builder.take_nodes())
        sizes = {"tokens": tokens, "tokens + 1": tokens + 1, "verified": verified}
        sizes |= {"visible": capacity, "capacity": capacity}
        if isinstance(self._batch, int):
            sizes["batch"] = self._batch
        _fix_sizes(self._graph, sizes)
        return self._model


def _fix_sizes(graph: ir.Graph, sizes: Mapping[str, int]) -> None:
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim.value) for dim in value.shape]
            )
