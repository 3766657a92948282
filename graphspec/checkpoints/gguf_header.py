"""The header of a GGUF file: metadata fields and where each tensor lies.

Read by hand rather than with gguf.GGUFReader: every length is checked against the file, so a truncated or
forged file fails at once, and a 50,000-token vocabulary takes a tenth of a second instead of four.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from graphspec.errors import CheckpointError

from .checkpoint import TensorInfo

Field = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# By the format's type id; little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's type and its place in the file."""

    info: TensorInfo
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata fields and tensors of one GGUF file, under GGUF's own names."""

    path: Path
    fields: Mapping[str, Field]
    tensors: Mapping[str, GgufTensor]

    def get_integer(self, key: str) -> int | None:
        value = self.fields.get(key)
        if value is not None and type(value) is not int:
            self._wrong_type(key, "an integer")
        return value

    def get_number(self, key: str) -> float | None:
        value = self.fields.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            self._wrong_type(key, "a number")
        if value is not None and not math.isfinite(value):
            self._wrong_type(key, f"finite, not {value}")
        return value

    def get_text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong_type(key, "a string")
        return value

    def get_flag(self, key: str) -> bool | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, bool):
            self._wrong_type(key, "a boolean")
        return value

    def get_texts(self, key: str) -> list[str] | None:
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong_type(key, "a list of strings")
        return [str(item) for item in value]

    def get_integers(self, key: str) -> list[int] | None:
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self._wrong_type(key, "a list of integers")
        return [int(item) for item in value]

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer that must be there unless it has a default."""
        value = self.get_integer(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self.path} has no metadata field {key}")
        if value < 1:
            raise CheckpointError(f"{self.path}: metadata field {key} must be positive, not {value}")
        return value

    def _wrong_type(self, key: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: metadata field {key} must be {wanted}")


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for a file that is not GGUF, is truncated or damaged, or uses a version, byte
    order or tensor type this program does not read."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file: it does not start with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


class _Cursor:
    """Reads forward through a file, never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its header needs {end} bytes and the file has "
                f"{len(self.data)}; download it again"
            )
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def integer(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize(code)))[0])

    def text(self) -> str:
        try:
            return self.take(self.integer("Q")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: a string in its header is not UTF-8") from error

    def field(self) -> Field:
        kind = self.integer("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        values: tuple[int | float | bool] = struct.unpack("<" + self._code(kind), self._scalars(kind, 1))
        return values[0]

    def _array(self) -> Field:
        kind, count = self.integer("I"), self.integer("Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        content = self._scalars(kind, count)
        return list(struct.unpack(f"<{count}{self._code(kind)}", content))

    def _scalars(self, kind: int, count: int) -> bytes:
        return self.take(count * struct.calcsize(self._code(kind)))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path} is damaged: its header has a field of unknown type {kind}")
        return _SCALARS[kind]


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(path, data)
    cursor.take(4)
    version = cursor.integer("I")
    if version not in _VERSIONS:
        what = "is big-endian" if version and version % 65536 == 0 else f"has GGUF version {version}"
        raise CheckpointError(f"{path} {what}; little-endian versions 2 and 3 are supported")
    num_tensors, num_fields = cursor.integer("Q"), cursor.integer("Q")
    fields: dict[str, Field] = {}
    for _ in range(num_fields):
        key = cursor.text()
        if key in fields:
            raise CheckpointError(f"{path} is damaged: metadata field {key} is there twice")
        fields[key] = cursor.field()
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        if name in tensors:
            raise CheckpointError(f"{path} is damaged: tensor {name} is there twice")
        tensors[name] = _tensor(cursor, name)
    header = GgufHeader(path, fields, tensors)
    alignment = header.integer("general.alignment", default=32)
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(path, fields, _placed(path, tensors, start, len(data)))


def _tensor(cursor: _Cursor, name: str) -> GgufTensor:
    """One tensor's entry; its offset still counts from the start of the data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    num_dims = cursor.integer("I")
    if num_dims > _MAX_DIMS:
        raise CheckpointError(f"{cursor.path} is damaged: tensor {name} has {num_dims} dimensions")
    lengths = [cursor.integer("Q") for _ in range(num_dims)]
    type_id, offset = cursor.integer("I"), cursor.integer("Q")
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has type {type_id}, which the installed gguf package does not know"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = lengths[0] if lengths else 1
    if row % block:
        raise CheckpointError(
            f"{cursor.path} is damaged: tensor {name} has rows of {row} elements, which {kind.name} "
            f"stores in blocks of {block}"
        )
    # GGUF lists the fastest-varying dimension first.
    info = TensorInfo(tuple(reversed(lengths)), kind.name)
    return GgufTensor(info, offset, math.prod(lengths) // block * block_bytes)


def _placed(path: Path, tensors: dict[str, GgufTensor], start: int, size: int) -> dict[str, GgufTensor]:
    placed = {
        name: GgufTensor(tensor.info, start + tensor.offset, tensor.num_bytes) for name, tensor in tensors.items()
    }
    beyond = [name for name, tensor in placed.items() if tensor.offset + tensor.num_bytes > size]
    if beyond:
        needed = max(tensor.offset + tensor.num_bytes for tensor in placed.values())
        raise CheckpointError(
            f"{path} is truncated: its tensors need {needed} bytes and the file has {size} ({len(beyond)} of "
            f"{len(placed)} tensors lie beyond its end, the first is {beyond[0]}); download it again"
        )
    return placed
