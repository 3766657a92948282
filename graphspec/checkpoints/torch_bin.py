"""PyTorch .bin files, unpickled with weights_only=True so that they cannot run code."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphspec.errors import CheckpointError

from .checkpoint import TensorInfo
from .listing import listed

if TYPE_CHECKING:
    import torch


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """Every tensor's shape and dtype; the data stays on disk. Raises CheckpointError for a file that is
    damaged, is not a flat state dict of dense tensors, or holds anything that could run code."""
    return {
        name: TensorInfo(tuple(tensor.shape), _dtype_name(tensor.dtype)) for name, tensor in _state_dict(path).items()
    }


def read_tensors(files: Mapping[str, Path], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the named tensors in order; `files` says which file each lies in."""
    opened: dict[Path, dict[str, torch.Tensor]] = {}
    for name in names:
        path = files[name]
        if path not in opened:
            opened[path] = _state_dict(path)
        # A copy: the original is a view of the mapped file, whose pages would stay with whoever keeps it.
        yield name, opened[path][name].detach().clone()


def _state_dict(path: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # About pickle protocols; what cannot be loaded raises.
            warnings.simplefilter("ignore", UserWarning)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged or holds Python objects other than tensors, which are not loaded because "
            "they could run code; convert it to safetensors with a tool you trust"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, IndexError, AttributeError) as error:
        # torch raises any of these for a damaged or truncated archive.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot read {path} as a PyTorch file: {first_line}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors")
    bad = [str(name) for name, value in loaded.items() if not _is_dense(name, value)]
    if bad:
        raise CheckpointError(f"{path} is not a flat dictionary of dense tensors: {listed(bad)} is something else")
    return loaded


def _is_dense(name: object, value: object) -> bool:
    import torch

    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided


def _dtype_name(dtype: torch.dtype) -> str:
    """The name the safetensors format gives the same dtype."""
    text = str(dtype).removeprefix("torch.")
    if text.startswith("float8_"):
        return "F8_" + text.removeprefix("float8_").upper().removesuffix("FN")
    for prefix, short in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I"), ("complex", "C")):
        if text.startswith(prefix):
            return short + text.removeprefix(prefix)
    return text.upper()
