"""A loop in a thread of its own, for callers in other threads: the server's requests.

submit ─▶ queue ─▶ the thread's turns ─▶ pieces to the caller
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from graphspec.errors import EngineError, GraphspecError

from .answer import new_answer
from .generate import LoadedBundle
from .loop import PREFILL_CHUNK, BatchReport, Loop, OnNews, Policy, Row
from .requests import check_count
from .sampling import SamplingParams

log = logging.getLogger(__name__)


class QueueFullError(GraphspecError):
    """More requests wait than the queue holds."""

    def __init__(self, message: str, retry_after: float) -> None:
        """`retry_after`: seconds."""
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one caller asks for."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculative: bool = True
    """False: one token a step. The text is the same."""


class Ticket:
    """A submitted request."""

    def __init__(self, scheduler: Scheduler, row: Row) -> None:
        self._scheduler, self._row = scheduler, row

    def cancel(self) -> None:
        """Ends the request within a step; its caller hears nothing more. From any thread, any number of times."""
        self._scheduler._cancel(self._row)


class Scheduler:
    """One thread that drives one engine."""

    def __init__(
        self,
        bundle: LoadedBundle,
        *,
        max_queue_size: int = 256,
        overlap: bool = True,
        width: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
    ) -> None:
        """`width`: drafts verified a step; None: the widest of the bundle. The engine is the scheduler's alone."""
        check_count("max_queue_size", max_queue_size)
        check_count("prefill_chunk", prefill_chunk)
        self._bundle = bundle
        self._max_queue_size, self._prefill_chunk = max_queue_size, prefill_chunk
        self._width = bundle.checked_width(width)
        self._loop = Loop(bundle.engine, Policy(overlap=overlap), on_batch=on_batch, on_failure=_log_failure)
        self._closing = self._giving_up = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="graphspec-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._loop.num_waiting

    def submit(self, request: GenerationRequest, on_piece: OnNews) -> Ticket:
        """Puts the request at the end of the queue; `on_piece` is called from the scheduler's thread. Raises
        RequestError, or QueueFullError."""
        answer = new_answer(self._bundle.manifest, self._bundle.tokenizer, request.prompt, request.params)
        width = self._width if request.speculative else 0
        row = Row(answer=answer, on_news=on_piece, width=width, chunk_size=self._prefill_chunk)
        with self._changed:
            if self._closing:
                raise QueueFullError("the server is shutting down; ask another one", retry_after=1.0)
            if (waiting := self._loop.num_waiting) >= self._max_queue_size:
                raise QueueFullError(
                    f"{waiting} requests are waiting, as many as --max-queue-size allows; try again later",
                    retry_after=1.0,
                )
            self._loop.add(row)
            self._changed.notify_all()
        return Ticket(self, row)

    def close(self, *, drain: float = 0.0) -> None:
        """Refuses new requests, goes on with the others for up to `drain` seconds, then fails them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._loop.idle, timeout=drain)
            self._giving_up = True
            self._changed.notify_all()
        self._thread.join()

    def _cancel(self, row: Row) -> None:
        with self._changed:
            self._loop.drop(row)
            self._changed.notify_all()

    def _run(self) -> None:
        loop = self._loop
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not loop.idle)
                if self._closing and loop.idle:
                    return
                if self._giving_up:
                    loop.fail_all(EngineError("the server shut down before the answer was complete; ask again"))
                loop.admit()
            try:
                loop.turn()
            except Exception as error:  # every request was told
                _log_failure(error)
            with self._changed:
                self._changed.notify_all()


def _log_failure(error: Exception) -> None:
    log.error("a step, or a caller, failed: %s", error, exc_info=error)
