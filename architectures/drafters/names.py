"""One spelling for the tensors of draft checkpoints: no `model.` or `medusa_head.` prefix, `layers.0.` for
`midlayer.`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphspec.checkpoints import Checkpoint, TensorInfo
from graphspec.detection import plain_name
from graphspec.errors import CheckpointError


class RenamedCheckpoint:
    """A checkpoint whose tensors answer to canonical names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored: dict[str, str] = {}
        for stored in checkpoint.tensors:
            name = _canonical(stored)
            if name in self._stored:
                raise CheckpointError(
                    f"'{checkpoint.name}' holds {stored} and {self._stored[name]}, two spellings of one tensor"
                )
            self._stored[name] = stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def name(self) -> str:
        return self._checkpoint.name

    @property
    def files(self) -> tuple[Path, ...]:
        return self._checkpoint.files

    @property
    def config(self) -> Mapping[str, Any]:
        return self._checkpoint.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: self._checkpoint.tensors[stored] for name, stored in self._stored.items()}

    def load(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        wanted = list(names)
        loaded = self._checkpoint.load([self._stored[name] for name in wanted])
        for name, (_, tensor) in zip(wanted, loaded, strict=True):
            yield name, tensor

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._checkpoint.tokenizer_files()


def _canonical(name: str) -> str:
    name = plain_name(name)
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
