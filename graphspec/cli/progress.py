"""What a long command is doing, on stderr: a line that moves on a terminal, else a line for every stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stage = Callable[[str], None]


@contextmanager
def stages() -> Iterator[Stage]:
    """Shows what the yielded function is told."""
    if not sys.stderr.isatty():
        started = time.monotonic()

        def show(text: str) -> None:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

        yield show
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Text on stdout is the command's own: it is not routed around the moving line.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
