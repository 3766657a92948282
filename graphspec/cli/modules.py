"""Where --arch-module looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def importable(modules: Sequence[str] | None) -> Iterator[None]:
    """Adds the current folder to the end of the Python path, where it hides nothing, if modules are named."""
    if not modules or "" in sys.path:
        yield
        return
    sys.path.append("")
    try:
        yield
    finally:
        sys.path.remove("")
