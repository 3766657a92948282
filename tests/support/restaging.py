"""A bundle like another, but for what its manifest says."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from graphspec.bundle import MANIFEST, read_manifest
from graphspec.staging import staging

_FILLED_IN = {"format", "graphspec_version", "created", "files", "checksum"}


def restage(bundle: Path, out: Path, files: Mapping[str, bytes] | None = None, **changes: object) -> Path:
    """Writes at `out` the files of `bundle`, and `files`, under its manifest with `changes`."""
    fields = read_manifest(bundle).model_dump(exclude=_FILLED_IN)
    with staging(out) as stage:
        shutil.copytree(bundle, stage.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        for name, content in (files or {}).items():
            (stage.path / name).write_bytes(content)
        stage.commit(fields | changes)
    return out
