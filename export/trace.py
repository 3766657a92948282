"""From the fused step to a graph: torch.export, then ONNX with the operators of dialect.py."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from graphspec.architectures.state import StateSpec
from graphspec.architectures.step import FusedStep, StepInputs, StepOutputs

from .dialect import translations

OPSET = 24

# Distinct sizes, none of them 0 or 1: torch.export would take equal ones for the same dimension.
_SIZES = {"batch": 2, "tokens": 5, "verified": 3, "visible": 17, "capacity": 29}

_INPUT_DIMS: dict[str, tuple[str | int, ...]] = {
    "tokens": ("batch", "tokens"),
    "kv_len": ("batch",),
    "n_tokens": ("batch",),
    "n_known": ("batch",),
    "next_token": ("batch",),
    "verify_offsets": ("verified",),
    "key_positions": ("visible",),
    "temperature": ("batch",),
    "top_k": ("batch",),
    "top_p": ("batch",),
    "min_p": ("batch",),
    "uniform": ("batch", "capacity", 1),
}
_FLOATS = frozenset({"temperature", "top_p", "min_p", "uniform"})
_SAMPLING = _FLOATS | {"top_k"}


def trace(step: FusedStep, *, on_stage: Callable[[str], None] = lambda _: None) -> ir.Model:
    """One graph, dynamic in batch, tokens, verified positions, visible positions and capacity.

    Inputs and outputs are named as StepInputs, StepOutputs and the states; an updated state is called
    `<state>.next`. Weights stay where they are: the graph refers to the module's tensors.
    """
    step.eval()
    example = StepInputs(*(_example(name, dims) for name, dims in _INPUT_DIMS.items()))
    states = [_zeros(spec) for spec in step.states]
    # torch.export wants the structure of the inputs, holding dimensions where they hold tensors.
    dimensions: Any = [_dynamic(dims) for dims in _INPUT_DIMS.values()]
    dynamic = (StepInputs(*dimensions), [_dynamic(spec.shape) for spec in step.states])
    with torch.no_grad(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")  # about torch's own internals
        on_stage("tracing")
        program = torch.export.export(step, (example, states), dynamic_shapes=dynamic, strict=False)
        on_stage("translating the trace to ONNX")
        exported = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=dict(translations()),
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    model = exported.model
    _name_interface(model.graph, step.states)
    if step.greedy:
        for value in [value for value in model.graph.inputs if value.name in _SAMPLING]:
            model.graph.inputs.remove(value)
    return model


def _example(name: str, dims: Sequence[str | int]) -> Tensor:
    shape = [_SIZES[dim] if isinstance(dim, str) else dim for dim in dims]
    return torch.zeros(shape, dtype=torch.float32 if name in _FLOATS else torch.int64)


def _zeros(spec: StateSpec) -> Tensor:
    shape = [_SIZES[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype))


def _dynamic(dims: Sequence[str | int]) -> dict[int, object]:
    return {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(dims) if isinstance(dim, str)}


def _name_interface(graph: ir.Graph, states: Sequence[StateSpec]) -> None:
    """Names inputs, outputs and dimensions after what they are; torch.export calls a dimension s56."""
    dims = [*_INPUT_DIMS.items(), *((spec.name, spec.shape) for spec in states)]
    names: dict[str | None, str] = {}
    for value, (name, shape) in zip(graph.inputs, dims, strict=True):
        value.name = name
        assert value.shape is not None
        for traced, dim in zip(value.shape, shape, strict=True):
            if isinstance(traced, ir.SymbolicDim) and isinstance(dim, str):
                names[traced.value] = dim
    _separate_outputs(graph)
    results = [*StepOutputs._fields[:-1], *(f"{spec.name}.next" for spec in states)]
    for value, result in zip(graph.outputs, results, strict=True):
        value.name = result
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(_renamed(value.shape, names))


def _separate_outputs(graph: ir.Graph) -> None:
    """A state that a drafter only reads is input and output: two values, to have two names."""
    for index, value in enumerate(graph.outputs):
        if value.is_graph_input():
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]


def _renamed(shape: ir.Shape, names: Mapping[str | None, str]) -> list[int | str | None]:
    """Sizes that torch derives ("s56 + 1") keep their formula, in our names."""

    def name(dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        return re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), dim.value)

    return [name(dim) for dim in shape]


class _quiet:  # noqa: N801 - a context manager, used like contextlib's
    """torch.onnx logs at warning level what is no concern of the user's (torchvision is missing)."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("torch.onnx")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
