"""Safetensors files: headers by our own bounded reader, data by the safetensors library."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.errors import CheckpointError

from .checkpoint import TensorInfo
from .json_file import parse_object

if TYPE_CHECKING:
    import torch

# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
}


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """Every tensor's shape and dtype, from the header only. Raises CheckpointError for a file that is
    damaged, truncated, or not safetensors."""
    header, data_bytes = _read_header(path)
    infos: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        infos[name], (begin, end) = _entry(path, name, entry)
        spans.append((begin, end, name))
    _check_spans(path, spans, data_bytes)
    return infos


def read_tensors(files: Mapping[str, Path], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the named tensors in order; `files` says which file each lies in."""
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name in names:
            path = files[name]
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                tensor = opened[path].get_tensor(name)
            except (SafetensorError, OSError, ValueError, AttributeError) as error:
                # AttributeError: a dtype this torch does not have.
                raise CheckpointError(f"cannot read tensor {name} of {path}: {error}") from error
            yield name, tensor
            del tensor  # not alive while the next one is read


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and how many bytes of data follow it."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is not a safetensors file: its header claims {length} bytes"
                    if size >= 8
                    else f"{path} is not a safetensors file: it has only {size} bytes"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: its header takes {8 + length} bytes and the file has {size}; "
                    "download it again"
                )
            content = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_object(content, f"the safetensors header of {path}"), size - 8 - length


def _entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, tuple[int, int]]:
    damaged = f"the safetensors header of {path} is damaged: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{damaged} is not described by an object")
    dtype = entry.get("dtype")
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(f"{damaged} has no valid dtype, shape and data_offsets")
    begin, end = offsets
    num_elements = math.prod(shape)
    # An unknown dtype may be a newer one of the format: the library decides when the tensor is read.
    if begin > end or (dtype in _BITS and (end - begin) * 8 != num_elements * _BITS[dtype]):
        raise CheckpointError(
            f"{damaged} takes bytes {begin} to {end}, which does not fit {dtype} of shape {list(shape)}"
        )
    return TensorInfo(shape, dtype), (begin, end)


def _naturals(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The format wants the tensors one after the other, without holes, up to the end of the file."""
    spans.sort()
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            raise CheckpointError(
                f"the safetensors header of {path} is damaged: tensor {name} starts at byte {begin} of the "
                f"data instead of {reached}"
            )
        reached = end
    if reached > data_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header describes {reached} bytes of data and the file has "
            f"{data_bytes}; download it again"
        )
    if reached < data_bytes:
        raise CheckpointError(
            f"{path} is damaged: it has {data_bytes} bytes of data and its header describes {reached}"
        )
