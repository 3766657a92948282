"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphspec.errors import BuildError
from graphspec.staging import is_full


def _readable() -> int:
    """The mode that a file has here which is made without a wish."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` when the block ends; nothing is left of what does not end.

    Raises BuildError for a full disk: writers in other languages say so in many ways.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.chmod(_readable())  # some writers keep what they write to its owner
        partial.replace(path)
    except Exception as error:
        if is_full(error):
            raise BuildError(
                f"disk full: {path} cannot be written; free some space, and the same command goes on"
            ) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
