"""Continuous batching over one engine: requests come and go while steps run.

    submit ─▶ queue ─▶ slot ─▶ prompt in chunks ─▶ steps ─▶ pieces to the caller

A turn launches at most one prompt chunk and one step of every row that has its prompt, then reads what the turn
before launched: the device never waits for the host (design §7). A row's end is therefore known one step late; the
step it was in once too often is dropped when it is read.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from graphspec.errors import EngineError, GraphspecError

from .answer import Answer, Piece, new_answer
from .engine import Chunk, Pending
from .generate import PREFILL_CHUNK, LoadedBundle
from .prefixes import Prefixes
from .requests import check_count
from .sampling import SamplingParams, uniform_table

log = logging.getLogger(__name__)

OnPiece = Callable[[Piece | GraphspecError], None]
"""Called from the scheduler's thread: pieces, the last of which carries the answer, or one error that ends it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What one step did."""

    width: int
    accepted: tuple[int, ...]
    """Drafts accepted in each row that still counted."""
    committed: int
    """Tokens that became output."""


class Ticket:
    """A submitted request."""

    def __init__(self, scheduler: Scheduler, row: _Row) -> None:
        self._scheduler, self._row = scheduler, row

    def cancel(self) -> None:
        """Ends the request within a step; its caller hears nothing more. From any thread, any number of times."""
        self._scheduler._cancel(self._row)


@dataclass(slots=True, eq=False)
class _Row:
    """A request in the queue or in a slot."""

    answer: Answer
    on_piece: OnPiece
    width: int
    slot: int = -1
    chunks: deque[Chunk] | None = None
    """Of the prompt, still to be launched; None: not admitted yet."""
    in_flight: int = 0
    """Launches that will commit at least one token each."""
    done: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Launch:
    """Work on the device, and the rows it is for."""

    pending: Pending
    rows: tuple[_Row, ...]
    width: int
    commits: bool
    """False: a chunk in the middle of a prompt."""


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
        self._bundle, self._engine = bundle, bundle.engine
        self._max_queue_size, self._prefill_chunk = max_queue_size, prefill_chunk
        self._overlap, self._on_batch = overlap, on_batch
        self._width = bundle.checked_width(width)
        self._free = set(range(self._engine.num_slots))
        self._prefixes = Prefixes()
        self._running: list[_Row] = []
        self._launched: deque[_Launch] = deque()
        self._waiting: deque[_Row] = deque()
        self._closing = self._giving_up = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="graphspec-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def submit(self, request: GenerationRequest, on_piece: OnPiece) -> Ticket:
        """Puts the request at the end of the queue. Raises RequestError, or QueueFullError."""
        answer = new_answer(self._bundle.manifest, self._bundle.tokenizer, request.prompt, request.params)
        row = _Row(answer, on_piece, self._width if request.speculative else 0)
        with self._changed:
            if self._closing:
                raise QueueFullError("the server is shutting down; ask another one", retry_after=1.0)
            if len(self._waiting) >= self._max_queue_size:
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, as many as --max-queue-size allows; try again later",
                    retry_after=1.0,
                )
            self._waiting.append(row)
            self._changed.notify_all()
        return Ticket(self, row)

    def close(self, *, drain: float = 0.0) -> None:
        """Refuses new requests, goes on with the others for up to `drain` seconds, then fails them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(self._idle, timeout=drain)
            self._giving_up = True
            self._changed.notify_all()
        self._thread.join()

    def _cancel(self, row: _Row) -> None:
        with self._changed:
            row.cancelled = True
            self._changed.notify_all()

    def _idle(self) -> bool:
        return not (self._waiting or self._running or self._launched)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not self._idle())
                if self._closing and self._idle():
                    return
                if self._giving_up:
                    self._give_up()
                admitted = self._admit()
            for row in admitted:
                self._start(row)
            self._turn()
            with self._changed:
                self._changed.notify_all()

    def _give_up(self) -> None:
        left = [*self._waiting, *self._running]
        self._waiting.clear()
        for row in left:
            if not row.cancelled:
                self._tell(row, EngineError("the server shut down before the answer was complete; ask again"))
            row.cancelled = True

    def _admit(self) -> list[_Row]:
        """Drops what was cancelled and gives free slots to those that waited longest → the new rows."""
        for row in [row for row in self._running if row.cancelled]:
            self._finish(row)
        waiting = [row for row in self._waiting if not row.cancelled]
        self._waiting.clear()
        self._waiting.extend(waiting)
        admitted = []
        while self._waiting and self._free:
            row = self._waiting.popleft()
            row.slot, row.answer.num_cached_tokens = self._prefixes.take(self._free, row.answer.prompt)
            self._free.remove(row.slot)
            self._running.append(row)
            admitted.append(row)
        return admitted

    def _start(self, row: _Row) -> None:
        answer = row.answer
        if answer.ended:  # max_new_tokens 0
            self._deliver(row, answer.end())
            return
        row.chunks = deque(answer.chunks(row.slot, self._prefill_chunk))
        try:
            table = uniform_table(answer.seed, self._engine.capacity)
            self._engine.admit(row.slot, answer.params, table, kept=answer.num_cached_tokens)
        except Exception as error:
            self._fail((row,), error)

    def _turn(self) -> None:
        """Launches, then reads: with overlap, what was launched before; without, all of it."""
        launched = self._launch()
        self._launched.extend(launched)
        kept = len(launched) if self._overlap else 0
        while len(self._launched) > kept:
            self._read(self._launched.popleft())

    def _launch(self) -> list[_Launch]:
        """One prompt chunk, so that it delays the steps of the others by no more, then one step for each width."""
        launched = []
        prefilling = next((row for row in self._running if row.chunks and not row.cancelled), None)
        if prefilling is not None and prefilling.chunks is not None:
            chunk = prefilling.chunks.popleft()
            last = not prefilling.chunks
            launched += self._try((prefilling,), 0, partial(self._engine.prefill, chunk), commits=last)
        ready = [row for row in self._running if self._has_more(row)]
        for width in sorted({row.width for row in ready}):
            rows = tuple(sorted((row for row in ready if row.width == width), key=lambda row: row.slot))
            slots = [row.slot for row in rows]
            launched += self._try(rows, width, partial(self._engine.step, slots, width))
        return launched

    def _has_more(self, row: _Row) -> bool:
        """Whether a step may add to the answer: not if what is launched is certain to fill it."""
        if row.done or row.cancelled or row.chunks is None or row.chunks:
            return False
        return len(row.answer.token_ids) + row.in_flight < row.answer.limit

    def _try(
        self, rows: tuple[_Row, ...], width: int, launch: Callable[[], Pending], *, commits: bool = True
    ) -> list[_Launch]:
        try:
            pending = launch()
        except Exception as error:
            self._fail(rows, error)
            return []
        for row in rows:
            row.in_flight += commits
        return [_Launch(pending, rows, width, commits)]

    def _read(self, launch: _Launch) -> None:
        try:
            result = launch.pending.result()
        except Exception as error:
            self._fail(launch.rows, error)
            return
        if not launch.commits:
            return
        accepted, committed = [], 0
        for index, row in enumerate(launch.rows):
            row.in_flight -= 1
            if row.done or row.cancelled:  # it ended before this was known
                continue
            before = len(row.answer.token_ids)
            count = int(result.accepted[index])
            pieces = row.answer.commit(result.tokens(index), accepted=count, width=launch.width)
            kept = len(row.answer.token_ids) - before
            accepted.append(min(count, kept))
            committed += kept
            self._deliver(row, pieces)
        self._on_batch(BatchReport(width=launch.width, accepted=tuple(accepted), committed=committed))

    def _deliver(self, row: _Row, pieces: Iterable[Piece]) -> None:
        if row.answer.ended:
            if row.chunks is not None:
                self._prefixes.keep(row.slot, (*row.answer.prompt, *row.answer.token_ids))
            self._finish(row)  # before its caller hears of it: who asks next finds the slot free
        for piece in pieces:
            self._tell(row, piece)

    def _fail(self, rows: Iterable[_Row], error: Exception) -> None:
        """Ends the rows that the failed launch was for, and no others."""
        log.error("a step failed: %s", error, exc_info=error)
        told = error if isinstance(error, GraphspecError) else EngineError(f"the engine failed: {error}")
        for row in rows:
            if not (row.done or row.cancelled):
                self._finish(row)
                self._tell(row, told)

    def _finish(self, row: _Row) -> None:
        if not row.done:
            row.done = True
            self._running.remove(row)
            self._free.add(row.slot)

    def _tell(self, row: _Row, news: Piece | GraphspecError) -> None:
        try:
            row.on_piece(news)
        except Exception:
            log.exception("a caller of the scheduler failed; its request is dropped")
            row.cancelled = True
