"""Continuous batching over one engine: requests come and go while steps run.

    add ─▶ queue ─▶ admit: slot ─▶ turn: prompt in chunks, steps ─▶ pieces to the caller

A turn launches prompt chunks and one step of every row that has its prompt. With overlap it then reads what the turn
before launched: the device never waits for the host (design §7). A row's end is known one step late then; the step
it was in once too often is dropped when it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from graphspec.errors import EngineError, GraphspecError

from .answer import Answer, Piece
from .engine import Chunk, Engine, Pending
from .prefixes import Prefixes
from .sampling import uniform_table

PREFILL_CHUNK = 256

OnNews = Callable[[Piece | GraphspecError], None]
"""Called during a turn: pieces, the last of which carries the answer, or one error that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What one step did."""

    width: int
    accepted: tuple[int, ...]
    """Drafts accepted in each row that still counted."""
    committed: int
    """Tokens that became output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a loop orders its work. The answers are the same."""

    overlap: bool = True
    """Launch before the launch before is read."""
    prompts_first: bool = False
    """Every prompt that has a slot is run before the next step, so that steps are of many rows: for callers who wait
    for all of it. Else one chunk a turn, so that it delays the steps of the others by no more."""
    reuse_prefixes: bool = True


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A request in the queue or in a slot."""

    answer: Answer
    on_news: OnNews
    width: int
    chunk_size: int = PREFILL_CHUNK
    cancelled: bool = False
    """Set from any thread: ends within a turn, and its caller hears nothing more."""
    slot: int = -1
    chunks: deque[Chunk] | None = None
    """Of the prompt, still to be launched; None: not started yet."""
    in_flight: int = 0
    """Launches that will commit at least one token each."""
    done: bool = False

    @property
    def has_more(self) -> bool:
        """Whether a step may add to the answer: not if what is launched is certain to fill it."""
        if self.done or self.cancelled or self.chunks is None or self.chunks:
            return False
        return len(self.answer.token_ids) + self.in_flight < self.answer.limit


@dataclass(frozen=True, slots=True)
class _Launch:
    """Work on the device, and the rows it is for."""

    pending: Pending
    rows: tuple[Row, ...]
    width: int
    commits: bool
    """False: a chunk in the middle of a prompt."""


class Loop:
    """One engine's requests. One thread at a time takes a turn; `add` and `admit` exclude each other."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        *,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """The engine is the loop's alone. `on_failure` hears what a launch raised, its rows an EngineError."""
        self._engine, self._policy = engine, policy
        self._on_batch, self._on_failure = on_batch, on_failure
        self._free = set(range(engine.num_slots))
        self._prefixes = Prefixes()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._launched: deque[_Launch] = deque()

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return not (self._waiting or self._running or self._launched)

    def add(self, row: Row) -> None:
        """Puts the request at the end of the queue."""
        self._waiting.append(row)

    def drop(self, row: Row) -> None:
        """Cancels the request, and takes it out of the queue if it is still there. Excludes `add` and `admit`."""
        row.cancelled = True
        if row.slot < 0 and row in self._waiting:
            self._waiting.remove(row)

    def admit(self) -> None:
        """Gives free slots to those that waited longest."""
        for row in [row for row in self._running if row.cancelled]:
            self._finish(row)
        while self._waiting and self._free:
            row = self._waiting.popleft()
            if not row.cancelled:
                self._place(row)

    def turn(self) -> None:
        """Launches, then reads: with overlap, what was launched before; without, each launch before the next."""
        try:
            for row in [row for row in self._running if row.chunks is None and not row.cancelled]:
                self._start(row)
            before = len(self._launched)
            for launch in self._launches():
                self._launched.append(launch)
                if not self._policy.overlap:
                    self._read(self._launched.popleft())
            for _ in range(min(before, len(self._launched))):
                self._read(self._launched.popleft())
        except BaseException as error:  # interrupted: what was half done cannot be told from what was not
            self.fail_all(EngineError(f"a step was interrupted by {type(error).__name__}, and every request with it"))
            raise

    def fail_all(self, error: GraphspecError) -> None:
        """Ends every request."""
        left = [*self._waiting, *self._running]
        self._waiting.clear()
        for row in left:
            self._end(row, error)

    def _place(self, row: Row) -> None:
        if self._policy.reuse_prefixes:
            row.slot, row.answer.num_cached_tokens = self._prefixes.take(self._free, row.answer.prompt)
        else:
            row.slot = min(self._free)  # a step runs the range of slots that holds its rows
        self._free.remove(row.slot)
        self._running.append(row)

    def _start(self, row: Row) -> None:
        answer = row.answer
        if answer.ended:  # max_new_tokens 0
            self._deliver(row, answer.end())
            return
        row.chunks = deque(answer.chunks(row.slot, row.chunk_size))
        try:
            table = uniform_table(answer.seed, self._engine.capacity)
            self._engine.admit(row.slot, answer.params, table, kept=answer.num_cached_tokens)
        except Exception as error:
            self._fail((row,), error)

    def _launches(self) -> Iterator[_Launch]:
        """Prompt chunks, then one step for each width."""
        for row in self._prefilling():
            while row.chunks and not (row.cancelled or row.done):
                chunk = row.chunks.popleft()
                yield from self._try((row,), 0, partial(self._engine.prefill, chunk), commits=not row.chunks)
                if not self._policy.prompts_first:
                    break
        ready = [row for row in self._running if row.has_more]
        for width in sorted({row.width for row in ready}):
            rows = tuple(sorted((row for row in ready if row.width == width), key=lambda row: row.slot))
            slots = [row.slot for row in rows]
            yield from self._try(rows, width, partial(self._engine.step, slots, width))

    def _prefilling(self) -> list[Row]:
        rows = [row for row in self._running if row.chunks and not row.cancelled]
        return rows if self._policy.prompts_first else rows[:1]

    def _try(
        self, rows: tuple[Row, ...], width: int, launch: Callable[[], Pending], *, commits: bool = True
    ) -> Iterator[_Launch]:
        try:
            pending = launch()
        except Exception as error:
            self._fail(rows, error)
            return
        for row in rows:
            row.in_flight += commits
        yield _Launch(pending, rows, width, commits)

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

    def _deliver(self, row: Row, pieces: Iterable[Piece]) -> None:
        if row.answer.ended:
            if row.chunks is not None:
                self._prefixes.keep(row.slot, (*row.answer.prompt, *row.answer.token_ids))
            self._finish(row)  # before its caller hears of it: who asks next finds the slot free
        for piece in pieces:
            self._tell(row, piece)

    def _fail(self, rows: Iterable[Row], error: Exception) -> None:
        """Ends the rows that the failed launch was for, and no others."""
        self._on_failure(error)
        told = error if isinstance(error, GraphspecError) else EngineError(f"the engine failed: {error}")
        if told is not error:
            told.__cause__ = error
        for row in rows:
            self._end(row, told)

    def _end(self, row: Row, error: GraphspecError) -> None:
        silent = row.done or row.cancelled
        self._finish(row)
        if not silent:
            self._tell(row, error)

    def _finish(self, row: Row) -> None:
        if not row.done:
            row.done = True
            if row.slot >= 0:
                self._running.remove(row)
                self._free.add(row.slot)

    def _tell(self, row: Row, news: Piece | GraphspecError) -> None:
        try:
            row.on_news(news)
        except Exception as error:
            row.cancelled = True
            self._on_failure(error)
