"""From the scheduler's thread to the event loop: the pieces of every answer that one HTTP request asked for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from graphspec.errors import GraphspecError

from ..answer import Generation, Piece
from ..refusals import QueueFullError
from ..scheduler import GenerationRequest, Scheduler, Ticket
from .metrics import Metrics, Timing

_AT_ONCE = 32
"""Answers of one HTTP request that may be queued or running: a large batch leaves the queue open to others."""
_ATTEMPTS = 10
"""To submit what is left of a batch, when others fill the queue."""
Event = tuple[int, Piece]
"""Which of the requests, and what was added to its answer."""


class Answers:
    """Runs some generation requests; iterating gives their pieces as they come."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[GenerationRequest],
        metrics: Metrics,
        *,
        timeout: float | None = None,
    ) -> None:
        """`timeout`: seconds for all of them together."""
        self._scheduler, self._metrics = scheduler, metrics
        deadline = None if timeout is None else time.monotonic() + timeout
        client = object()  # what one HTTP request asks for shares one client's part of the rows
        self._waiting = deque(enumerate(replace(one, client=client, deadline=deadline) for one in requests))
        self._running: dict[int, tuple[Ticket, Timing]] = {}
        self._events: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Submits what the queue takes, at least one. Raises RequestError or QueueFullError, and then runs none."""
        try:
            self._submit()
            if not self._running:
                self._submit_next()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stops what still runs; nothing more is submitted."""
        self._waiting.clear()
        for ticket, _ in self._running.values():
            ticket.cancel()
            self._metrics.finished("abort")
        self._running.clear()

    def abandon(self) -> None:
        """The client is gone: stops everything, and ends the iteration with ClientDisconnect."""
        self.cancel()
        self._events.put_nowait((0, ClientDisconnect()))

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises what ended one of the answers, or ClientDisconnect; the others are stopped then."""
        try:
            while self._running or self._waiting:
                if not self._running:
                    await self._retry()
                index, event = await self._events.get()
                if isinstance(event, Exception):
                    self._failed(index)
                    raise event
                if index in self._running:
                    self._take(index, event)
                    yield index, event
                    self._submit()
        finally:
            self.cancel()

    async def all(self) -> list[Generation]:
        """Every answer, in the order of the requests."""
        done = {index: piece.generation async for index, piece in self if piece.generation is not None}
        return [done[index] for index in sorted(done)]

    def _failed(self, index: int) -> None:
        if self._running.pop(index, None):
            self._metrics.finished("error")

    def _take(self, index: int, piece: Piece) -> None:
        _, timing = self._running[index]
        self._metrics.took(piece, timing)
        if piece.generation is not None:
            del self._running[index]

    def _submit(self) -> None:
        with suppress(QueueFullError):
            while self._waiting and len(self._running) < _AT_ONCE:
                self._submit_next()

    def _submit_next(self) -> None:
        index, request = self._waiting[0]
        ticket = self._scheduler.submit(request, lambda piece: self._arrived(index, piece))
        self._waiting.popleft()
        self._running[index] = ticket, self._metrics.started(len(request.prompt))

    async def _retry(self) -> None:
        """What is left of a batch that others have pushed out of the queue waits: its client has no part in that."""
        for attempt in range(_ATTEMPTS):
            if not self._waiting:  # the client is gone
                return
            try:
                self._submit_next()
                return
            except QueueFullError as error:
                if attempt == _ATTEMPTS - 1:
                    raise
                await asyncio.sleep(min(error.retry_after, 1.0))

    def _arrived(self, index: int, event: Piece | GraphspecError) -> None:
        """Called in the scheduler's thread."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))


@asynccontextmanager
async def abandoned_on_disconnect(receive: Receive, answers: Answers) -> AsyncIterator[None]:
    """Within, a client that hangs up stops its answers; in the end nothing of them runs."""
    watcher = asyncio.create_task(_watch(receive, answers))
    try:
        yield
    finally:
        watcher.cancel()
        answers.cancel()


async def _watch(receive: Receive, answers: Answers) -> None:
    message: Any = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
    answers.abandon()
