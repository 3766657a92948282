"""Who asks a scheduler for something, and hears what comes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from graphspec.errors import GraphspecError
from graphspec.runtime.answer import Generation, Piece

WAIT = 60.0
"""Seconds; a test that waits longer has hung."""


@dataclass
class Caller:
    """Collects what a request is told."""

    pieces: list[Piece] = field(default_factory=list)
    error: GraphspecError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, news: Piece | GraphspecError) -> None:
        assert not self.ended.is_set(), "nothing comes after the end"
        if isinstance(news, GraphspecError):
            self.error = news
        else:
            self.pieces.append(news)
        if self.error or self.pieces[-1].generation:
            self.ended.set()

    def generation(self) -> Generation:
        """The answer, which is what its pieces add up to."""
        assert self.ended.wait(WAIT)
        assert self.error is None
        last = self.pieces[-1].generation
        assert last is not None
        assert "".join(piece.text for piece in self.pieces) == last.text
        assert [token for piece in self.pieces for token in piece.token_ids] == list(last.token_ids)
        return last


def reached(condition: Callable[[], bool]) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + WAIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()
