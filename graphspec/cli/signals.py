"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it began is cleared away, and a line is said."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Ended(KeyboardInterrupt):
    """A signal that ends the process has come. Libraries that let Ctrl-C through let it through too."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def ending_signals() -> Iterator[None]:
    """Raises Ended in the block within, once, where the signals would have killed the process at once.

    A signal that is ignored (nohup) or has a handler of the program around us is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def line_and_status(interrupt: KeyboardInterrupt) -> tuple[str, int]:
    """What is said at the end, and the status a shell gives a command that the signal killed."""
    number = interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT
    return _SAID[signal.Signals(number)], 128 + number


def _end(number: int, _frame: FrameType | None) -> None:
    # Some senders repeat themselves (a shell and its terminal both hang up): the clearing away goes on.
    signal.signal(number, signal.SIG_IGN)
    raise Ended(number)
