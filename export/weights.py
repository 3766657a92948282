"""Weights of a lowered graph: made one at a time when they are written, never copied through passes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

_SAFETENSORS_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "int4": "U8",  # two in a byte, along the last dimension
}


def derived(
    source: ir.TensorProtocol, make: Callable[[Array], Array], shape: tuple[int, ...], dtype: ir.DataType, name: str
) -> ir.LazyTensor:
    """A weight computed from another when it is needed."""
    return ir.LazyTensor(
        lambda: ir.tensor(make(source.numpy())), dtype=dtype, shape=ir.Shape(shape), name=name, cache=False
    )


def static_shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """A stored tensor's shape: it has no symbolic dimension."""
    return tuple(dim for dim in tensor.shape if isinstance(dim, int))


def write_safetensors(path: Path, tensors: Mapping[str, ir.TensorProtocol]) -> dict[str, tuple[int, int]]:
    """Writes the tensors, one in memory at a time → offset in the file and length in bytes of each.

    Tensors whose size is a multiple of 64 come first, so that every one of them starts on a multiple of 64: a
    mapped file is then aligned for vector loads.
    """
    ordered = sorted(tensors, key=lambda name: (tensors[name].nbytes % 64 != 0, name))
    header: dict[str, dict[str, Any]] = {}
    places: dict[str, tuple[int, int]] = {}
    position = 0
    for name in ordered:
        tensor = tensors[name]
        end = position + tensor.nbytes
        kind = _SAFETENSORS_TYPES[tensor.dtype.numpy().name]
        header[name] = {"dtype": kind, "shape": _stored_shape(tensor), "data_offsets": (position, end)}
        places[name] = (position, tensor.nbytes)
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)
    start = 8 + len(encoded)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for name in ordered:
            file.write(tensors[name].tobytes())
    return {name: (start + offset, length) for name, (offset, length) in places.items()}


def _stored_shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    shape = static_shape(tensor)
    return (*shape[:-1], shape[-1] // 2) if tensor.dtype == ir.DataType.INT4 else shape


def large_initializers(graph: ir.Graph, smallest: int = 1024) -> dict[str, ir.TensorProtocol]:
    """The graph's weights: initializers of at least `smallest` bytes, by name."""
    return {
        name: value.const_value
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= smallest
    }


def made_of(names: Collection[str], weights: Mapping[str, ir.TensorProtocol]) -> dict[str, ir.TensorProtocol]:
    """Those of the weights that are called so, or were made of one that was: `name.int8`, `name.scale`."""
    return {name: tensor for name, tensor in weights.items() if {name, name.rpartition(".")[0]} & {*names}}


def weights_to_inputs(model: ir.Model, names: Iterable[str]) -> None:
    """Turns these initializers into inputs of the same names, in place."""
    graph = model.graph
    for name in names:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)


def externalise(model: ir.Model, path: Path, location: str, *, smallest: int = 1024) -> None:
    """Moves every initializer of at least `smallest` bytes to a safetensors file that the graph refers to.

    `location` is the path of the file as the graph's own directory sees it.
    """
    graph = model.graph
    large = large_initializers(graph, smallest)
    places = write_safetensors(path, large)
    for name, (offset, length) in places.items():
        tensor, shape = large[name], ir.Shape(static_shape(large[name]))
        graph.initializers[name].const_value = ir.ExternalTensor(
            location,
            offset,
            length,
            tensor.dtype,
            shape=shape,
            name=name,
            base_dir=path.parent,
        )
