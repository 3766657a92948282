"""From what the user typed to a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from graphspec.errors import CheckpointError, ConfigError

from .checkpoint import Checkpoint
from .directory import open_directory
from .gguf_file import open_gguf
from .hub import open_hub
from .listing import listed


def open_checkpoint(
    model: str | os.PathLike[str], *, revision: str | None = None, cache_dir: Path | None = None
) -> Checkpoint:
    """Opens a checkpoint; headers only, weights are read by `load`.

    `model` is a directory (config.json with safetensors or pytorch_model.bin weights, or one .gguf file), a
    .gguf file, or a hub id org/name, which is downloaded into `cache_dir` (by default the hub's own cache)
    at `revision` (a branch, tag or commit). Raises CheckpointError if there is nothing of the kind."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"the model is {model!r}: pass a directory, a .gguf file, or a hub id org/name, as text")
    name = os.fspath(model)
    if not name:
        raise CheckpointError("no model was named: pass a directory, a .gguf file, or a hub id org/name")
    # Unlike pathlib's, these two take a name that no file could have without raising.
    path = local_path(name)
    if os.path.exists(path):
        if revision is not None:
            raise CheckpointError(f"{name} is a local path, and only a hub id has a revision ({revision!r})")
        return _open_path(path, name)
    if isinstance(model, os.PathLike) or _looks_like_path(name):
        raise CheckpointError(f"no such file or directory: {name}")
    return open_hub(name, revision, cache_dir)


def local_path(name: str) -> Path:
    """Where a model of that name would be, if it is no hub id."""
    return Path(os.path.expanduser(name))


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(("/", ".gguf"))


def _open_path(path: Path, name: str) -> Checkpoint:
    if not path.is_dir():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{name} is a file, but not a .gguf: pass the directory it lies in")
        return open_gguf(path, name)
    gguf_files = sorted(file for file in path.glob("*") if file.suffix.lower() == ".gguf")
    if not gguf_files or _has_other_weights(path):
        return open_directory(path, name)
    if len(gguf_files) > 1:
        raise CheckpointError(
            f"{name} holds {len(gguf_files)} .gguf files ({listed([file.name for file in gguf_files], 6)}): "
            "pass the path of one of them"
        )
    return open_gguf(gguf_files[0], name)


def _has_other_weights(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
