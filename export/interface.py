"""A graph as the manifest describes it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphspec.architectures.step import FusedStep


def graph_entry(
    name: str, file: str, role: str, widths: tuple[int, ...], model: ir.Model, step: FusedStep, batch: int | None = None
) -> dict[str, Any]:
    """The manifest's entry: inputs, outputs, and the caches updated in place. `batch` None: any."""
    return {
        "name": name,
        "file": file,
        "role": role,
        "widths": widths,
        "batch_sizes": "dynamic" if batch is None else (batch,),
        "inputs": [_tensor_entry(value) for value in model.graph.inputs],
        "outputs": [_tensor_entry(value) for value in model.graph.outputs],
        "aliases": {f"{spec.name}.next": spec.name for spec in step.states},
    }


def _tensor_entry(value: ir.Value) -> dict[str, Any]:
    assert value.shape is not None
    assert value.dtype is not None
    shape = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
    return {"name": value.name, "dtype": value.dtype.numpy().name, "shape": shape}
