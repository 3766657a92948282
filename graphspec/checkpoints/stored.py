"""The one concrete checkpoint: what a format read from its headers, and how to get at the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.errors import CheckpointError

from .checkpoint import TensorInfo
from .listing import listed

if TYPE_CHECKING:
    import torch

# Elements checked at once: bounds the temporary masks to a few MiB whatever the tensor's size.
_FINITE_CHUNK = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint whose headers have been read; weights and tokenizer are read when asked for."""

    name: str
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    read: Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]
    """Yields the named tensors in the order asked for, unchecked."""
    read_tokenizer: Callable[[], Mapping[str, bytes]]

    def load(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields `(name, tensor)` in the order of `names`, one at a time. Raises CheckpointError for a name
        the checkpoint lacks or that holds complex numbers before reading anything, and instead of yielding a tensor
        that is not finite in float32."""
        wanted = list(names)
        unknown = [name for name in wanted if name not in self.tensors]
        if unknown:
            raise CheckpointError(f"checkpoint {self.name} has no tensor named {listed(unknown)}")
        if odd := [f"{name} ({self.tensors[name].dtype})" for name in wanted if _is_complex(self.tensors[name])]:
            raise CheckpointError(
                f"checkpoint {self.name} holds complex numbers, which no model here computes with: {listed(odd)}"
            )
        return self._finite(wanted)

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self.read_tokenizer()

    def _finite(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self.read(names)
        for name, tensor in tensors:
            if bad := count_non_finite(tensor):
                # Nothing bad is handed out; the rest is read only so that the message names every one.
                found = [_described(name, tensor, bad), *_non_finite(tensors)]
                raise CheckpointError(
                    f"checkpoint {self.name}: {len(found)} of the {len(names)} tensors asked for hold NaN or "
                    f"infinite values: {listed(found)}; the file is damaged, or its weights overflowed when they "
                    "were saved or are beyond float32, so get the checkpoint again"
                )
            yield name, tensor
            del tensor  # not alive while the next one is read


def _is_complex(info: TensorInfo) -> bool:
    return info.dtype.startswith("C") and info.dtype[1:].isdigit()


def _non_finite(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[str]:
    for name, tensor in tensors:
        if bad := count_non_finite(tensor):
            yield _described(name, tensor, bad)


def _described(name: str, tensor: torch.Tensor, bad: int) -> str:
    return f"{name} ({bad} of {tensor.numel()} values)"


def count_non_finite(tensor: torch.Tensor) -> int:
    """Values of a tensor of any dtype that are NaN or infinite in float32; 0 for integers and booleans."""
    import torch

    if not tensor.is_floating_point():
        return 0
    bad = 0
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _FINITE_CHUNK):
        chunk = flat[start : start + _FINITE_CHUNK]
        # torch has no isfinite for the 8-bit floats; a float64 may be finite and more than float32 holds.
        values = chunk.float() if chunk.element_size() in (1, 8) else chunk
        bad += int(values.numel() - torch.isfinite(values).sum())
    return bad
