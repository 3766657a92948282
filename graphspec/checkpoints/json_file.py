"""JSON files of a checkpoint, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphspec.errors import CheckpointError


def read_bytes(path: Path) -> bytes:
    """The whole file; CheckpointError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object; `where` names the source in the CheckpointError raised for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {_json_type(value)}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path), str(path))


def _json_type(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
