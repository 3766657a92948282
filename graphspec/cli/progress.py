"""What a long command is doing, on stderr: a line that moves on a terminal, else a line for every stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stage = Callable[[str], None]
Progressed = Callable[[str, int, int, str], None]
"""Called with a label, how many are done, of how many, and a note."""
_SPACING_SECONDS = 5.0


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


@contextmanager
def bars() -> Iterator[tuple[Stage, Progressed]]:
    """Stages, and counts towards a total: a bar on a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        with stages() as stage:
            yield stage, _spaced(stage)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=None)

        def show(label: str, done: int, total: int, note: str) -> None:
            progress.update(task, description=f"{label} {note}".strip(), completed=done, total=total)

        yield lambda text: progress.update(task, description=text, completed=0, total=None), show


def _spaced(stage: Stage) -> Progressed:
    """The last of each label is always said."""
    said = [-_SPACING_SECONDS]

    def show(label: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if done >= total or now - said[0] >= _SPACING_SECONDS:
            said[0] = now
            stage(f"{label} {done:,}/{total:,} {note}".strip())

    return show
