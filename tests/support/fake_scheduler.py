"""A scheduler that does what the test says: takes requests, and gives the pieces that the test gives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graphspec.errors import GraphspecError
from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.answer import Generation, Piece
from graphspec.runtime.refusals import QueueFullError
from graphspec.runtime.scheduler import GenerationRequest
from graphspec.runtime.stops import FinishReason


@dataclass(slots=True)
class FakeTicket:
    """A request that was taken."""

    request: GenerationRequest
    give: Callable[[Piece | GraphspecError], None]
    """Hands a piece to the server, as the scheduler's thread would."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()

    def give_text(self, text: str, *, last: bool = False) -> None:
        """A piece with one token for each character."""
        ids = tuple(map(ord, text))
        whole = Generation(
            text=text,
            token_ids=ids,
            finish_reason="length",
            num_prompt_tokens=len(self.request.prompt),
            seed=0,
            acceptance=AcceptanceStatistics(),
        )
        self.give(Piece(index=0, text=text, token_ids=ids, generation=whole if last else None))

    def give_answer(self, pieces: Sequence[str], finish_reason: FinishReason = "stop") -> None:
        """A whole answer, one token for each character."""
        text = "".join(pieces)
        ids = tuple(map(ord, text))
        whole = Generation(
            text=text,
            token_ids=ids,
            finish_reason=finish_reason,
            text_ends=tuple(range(1, len(ids) + 1)),
            num_prompt_tokens=len(self.request.prompt),
            seed=0,
            acceptance=AcceptanceStatistics(),
        )
        for piece in pieces:
            self.give(Piece(index=0, text=piece, token_ids=tuple(map(ord, piece))))
        self.give(Piece(index=0, text="", token_ids=(), generation=whole))


class FakeScheduler:
    """Nothing happens by itself; at most `room` requests are taken."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.tickets: list[FakeTicket] = []
        self.drained: list[float] = []
        """What `close` was called with."""
        self.may_close = threading.Event()
        self.num_running = self.num_waiting = 0
        self.cache_usage = 0.0

    def submit(self, request: GenerationRequest, on_piece: Callable[[Piece | GraphspecError], None]) -> FakeTicket:
        if len(self.tickets) >= self.room:
            raise QueueFullError("the queue is full", retry_after=1.5)
        self.tickets.append(FakeTicket(request, on_piece))
        return self.tickets[-1]

    def close(self, *, drain: float = 0.0) -> None:
        self.drained.append(drain)
        self.may_close.wait(drain)

    def wait_for(self, count: int) -> list[FakeTicket]:
        """Until that many requests were taken."""
        end = time.monotonic() + 10
        while len(self.tickets) < count:
            assert time.monotonic() < end
            time.sleep(0.005)
        return self.tickets


class ScriptedScheduler(FakeScheduler):
    """Every request is answered at once with these pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: Sequence[str] = ()
        self.finish_reason: FinishReason = "stop"
        self.may_close.set()

    def submit(self, request: GenerationRequest, on_piece: Callable[[Piece | GraphspecError], None]) -> FakeTicket:
        ticket = super().submit(request, on_piece)
        ticket.give_answer(self.pieces, self.finish_reason)
        return ticket
