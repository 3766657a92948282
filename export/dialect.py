"""The operators of graphspec.architectures.ops as ONNX nodes of the domain `graphspec`.

A traced graph is standard ONNX plus these nodes; each backend's lowering replaces them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnxscript import values

from graphspec.architectures import ops  # noqa: F401 - registers the torch operators

DOMAIN = "graphspec"
_SCHEMA = onnx.defs.OpSchema


@dataclass(frozen=True, slots=True)
class Operator:
    """One node type: its ONNX name, inputs and attributes, and the torch operator it stands for."""

    name: str
    torch_name: str
    """In torch.ops.graphspec."""
    inputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...] = ()


_FLOAT, _INT = _SCHEMA.AttrType.FLOAT, _SCHEMA.AttrType.INT

OPERATORS = (
    Operator("Linear", "linear", ("x", "weight"), (("bound", _FLOAT),)),
    Operator("RmsNorm", "rms_norm", ("x", "weight"), (("eps", _FLOAT),)),
    Operator("SplitHeads", "split_heads", ("x",), (("heads", _INT),)),
    Operator("Rotary", "rotary", ("x", "cos", "sin")),
    Operator("SwiGlu", "swiglu", ("x",)),
    Operator("WriteCache", "write_cache", ("cache", "update", "start")),
    Operator("WriteHistory", "write_history", ("history", "tokens", "start")),
    Operator("Attention", "attention", ("q", "keys", "values", "mask"), (("scale", _FLOAT),)),
    Operator(
        "DraftAttention",
        "draft_attention",
        ("q", "keys", "values", "mask", "new_keys", "new_values"),
        (("scale", _FLOAT),),
    ),
    Operator("TakeRows", "take_rows", ("x", "rows")),
    Operator("Sample", "sample", ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")),
)


def _register(operator: Operator) -> None:
    parameter = _SCHEMA.FormalParameter
    # Types are carried over from torch; the schema only has to name inputs and attributes.
    anything = [f"T{index}" for index in range(len(operator.inputs) + 1)]
    types = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(int64)", "tensor(bool)"]
    onnx.defs.register_schema(
        _SCHEMA(
            operator.name,
            DOMAIN,
            1,
            inputs=[parameter(name, kind) for name, kind in zip(operator.inputs, anything[1:], strict=True)],
            outputs=[parameter("y", anything[0])],
            type_constraints=[(kind, types, "") for kind in anything],
            attributes=[_SCHEMA.Attribute(name, kind, "", required=True) for name, kind in operator.attributes],
        )
    )


def _translation(operator: Operator, opset: values.Opset) -> Callable[..., Any]:
    attributes = [name for name, _ in operator.attributes]

    def translate(*arguments: Any, **named: Any) -> Any:
        tensors = arguments[: len(operator.inputs)]
        given = dict(zip(attributes, arguments[len(operator.inputs) :], strict=False)) | named
        return getattr(opset, operator.name)(*tensors, **given)

    return translate


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """torch operator → function that emits its node: `custom_translation_table` of torch.onnx.export."""
    if not onnx.defs.has(OPERATORS[0].name, DOMAIN):
        for operator in OPERATORS:
            _register(operator)
    opset = values.Opset(DOMAIN, 1)
    registered = torch.ops.graphspec
    return {getattr(registered, operator.torch_name).default: _translation(operator, opset) for operator in OPERATORS}
