"""Continuous batching over one engine: requests come and go while steps run.

    add ─▶ queue ─▶ admit: slot ─▶ turn: prompt in chunks, steps ─▶ pieces to the caller
    waiting ─────── queue ──────── prefill ───── first token ───── decode ───── end

A turn launches prompt chunks and one step of every row that has its prompt. With overlap it then reads what the turn
before launched: the device never waits for the host (design §7). A row's end is known one step late then; the step
it was in once too often is dropped when it is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from graphspec.errors import EngineError, GraphspecError

from .answer import Piece
from .engine import Engine, Pending
from .fair_queue import FairQueue
from .prefixes import Copy, Prefixes
from .refusals import DeadlineError
from .rows import BatchReport, RequestReport, Row, each_width
from .sampling import uniform_table
from .width_policy import AUTO, Choice, WidthPolicy

TIMEOUT = "timeout"
"""Why an answer ended that its deadline cut short."""
_RECENT = 32
"""Answers that tell how fast answers come."""
_LONGEST_WAIT = 60.0
"""Seconds: nobody is told to stay away for longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a loop orders its work. The answers are the same."""

    overlap: bool = True
    """Launch before the launch before is read."""
    prompts_first: bool = False
    """Every prompt that has a slot is run before the next step, so that steps are of many rows: for callers who wait
    for all of it. Else one chunk a turn, so that it delays the steps of the others by no more."""
    reuse_prefixes: bool = True
    most_stored: int = 0
    """Tokens whose caches are kept beside the slots, where the engine can."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Work on the device, and the rows it is for."""

    pending: Pending
    rows: tuple[Row, ...]
    width: int
    num_drafts: int | None
    """Asked for."""
    commits: bool
    """False: a chunk in the middle of a prompt."""
    is_step: bool
    longest: int
    """Positions of its longest row."""
    begun: float


class Loop:
    """One engine's requests. One thread at a time takes a turn; `add` and `admit` exclude each other."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        *,
        widths: WidthPolicy | None = None,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_answer: Callable[[RequestReport], None] = lambda _: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The engine is the loop's alone. `widths` chooses for rows of width "auto"; a loop without it takes none.
        `on_failure` hears what a launch raised, its rows an EngineError."""
        self._engine, self._policy, self._widths, self._clock = engine, policy, widths, clock
        self._on_batch, self._on_answer, self._on_failure = on_batch, on_answer, on_failure
        self._free = set(range(engine.num_slots))
        self._prefixes = Prefixes(engine.num_slots, num_places=engine.num_places, most_stored=policy.most_stored)
        self._copies: list[Copy] = []
        """Of this turn: made whether or not the request that they are for is cancelled, as later ones count on them."""
        self._waiting: FairQueue[Row] = FairQueue()
        self._running: list[Row] = []
        self._launched: deque[_Launch] = deque()
        self._dated: dict[Row, float] = {}
        self._expired: list[Row] = []
        self._unplaced: list[tuple[Row, Exception]] = []
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self._oldest_first = False
        self._device_seconds = 0.0
        """Not reported yet."""
        self._newest_read = 0.0

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

    @property
    def cache_usage(self) -> float:
        """Share of the positions of all slots that running requests use. From any thread."""
        used = sum(row.length for row in tuple(self._running))
        return used / (self._engine.num_slots * self._engine.capacity)

    @property
    def retry_after(self) -> float:
        """Seconds until those who wait now will have been served, as fast as answers came lately; from 1 to 60."""
        ends = tuple(self._ends)
        each = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0
        return min(max(len(self._waiting) * each, 1.0), _LONGEST_WAIT)

    def serves(self, client: Hashable) -> bool:
        """Whether a request of the client waits or runs. Excludes `add` and `admit`."""
        return client in self._waiting or any(row.client == client for row in self._running)

    def add(self, row: Row) -> None:
        """Puts the request into the queue."""
        if row.width == AUTO and self._widths is None:
            raise ValueError("a row of width auto in a loop that has no width policy")
        if self.idle:  # what was answered before the pause says nothing about now
            self._ends.clear()
        row.added = self._clock()
        self._waiting.add(row)
        if row.deadline is not None:
            self._dated[row] = row.deadline

    def drop(self, row: Row) -> None:
        """Cancels the request, and takes it out of the queue if it is still there. Excludes `add` and `admit`."""
        row.cancelled = True
        self._waiting.remove(row)
        if row.slot < 0:
            self._dated.pop(row, None)

    def admit(self) -> None:
        """Gives free slots to those whose turn it is."""
        for row in [row for row in self._running if row.cancelled]:
            self._finish(row)
        now = self._clock()
        self._expired = [row for row, deadline in self._dated.items() if deadline <= now]
        for row in self._expired:
            self._waiting.remove(row)
        while self._waiting and self._free:
            row = self._waiting.pop(self._running)
            if row.cancelled:
                self._dated.pop(row, None)
                continue
            try:
                self._place(row)
            except Exception as error:  # told in the turn: whoever admits must live
                self._unplaced.append((row, error))

    def turn(self) -> None:
        """Launches, then reads: with overlap, what was launched before; without, each launch before the next."""
        try:
            for row in self._expired:
                self._expire(row)
            unplaced, self._unplaced = self._unplaced, []
            for row, error in unplaced:
                self._fail((row,), error)
            copies, self._copies = self._copies, []
            for copy in copies:
                self._engine.copy(copy.source, copy.target, copy.length)
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
        self._copies = [*self._prefixes.forget_stored()]
        for row in [*self._waiting.clear(), *self._running]:
            self._end(row, error)

    def _place(self, row: Row) -> None:
        if self._policy.reuse_prefixes:
            taken = self._prefixes.take(self._free, row.answer.reusable)
            row.slot, row.answer.num_cached_tokens = taken.slot, taken.kept
            self._copies += taken.copies
        else:
            row.slot = min(self._free)  # a step runs the range of slots that holds its rows
        row.placed = self._clock()
        self._free.remove(row.slot)
        self._running.append(row)

    def _start(self, row: Row) -> None:
        answer = row.answer
        if answer.ended:  # max_new_tokens 0
            self._deliver(row, answer.end())
            return
        try:
            num_drafts = row.width if isinstance(row.width, int) else None
            row.chunks = deque(answer.chunks(row.slot, row.chunk_size, num_drafts=num_drafts))
            table = uniform_table(answer.seed, self._engine.capacity)
            self._engine.admit(row.slot, answer.params, table, kept=answer.num_cached_tokens)
        except Exception as error:
            self._fail((row,), error)

    def _expire(self, row: Row) -> None:
        """Its time is over: it ends with what there is of it, or with an error if there is nothing."""
        if row.done or row.cancelled:
            return
        if row.answer.token_ids:
            self._deliver(row, row.answer.end(TIMEOUT))
        else:
            said = "the server was too busy to begin the answer in the time it was given"
            self._end(row, DeadlineError(said, retry_after=self.retry_after))

    def _launches(self) -> Iterator[_Launch]:
        """Prompt chunks, then one step for each width."""
        for row in self._prefilling():
            while row.chunks and not (row.cancelled or row.done):
                chunk = row.chunks.popleft()
                launch = partial(self._engine.prefill, chunk)
                yield from self._try((row,), None, chunk.num_drafts, launch, commits=not row.chunks)
                if not self._policy.prompts_first:
                    break
        ready = [row for row in self._running if row.has_more]
        each = each_width(ready, self._widths, on_demand=self._engine.drafts_on_demand)
        for width in sorted({chosen.width for chosen in each.values()}):
            rows = tuple(sorted((row for row in ready if each[row].width == width), key=lambda row: row.slot))
            slots = [row.slot for row in rows]
            num_drafts = max(each[row].num_drafts for row in rows)
            logits = any(row.answer.wants_logits for row in rows)
            launch = partial(self._engine.step, slots, width, num_drafts=num_drafts, logits=logits)
            yield from self._try(rows, width, num_drafts, launch)

    def _prefilling(self) -> list[Row]:
        """Those whose prompts are run now. One at a time, it is in turn the one that came first, so that it gets done,
        and the one with the least left, so that short prompts do not wait for long ones."""
        rows = [row for row in self._running if row.chunks and not row.cancelled]
        if self._policy.prompts_first or not rows:
            return rows
        self._oldest_first = not self._oldest_first
        return rows[:1] if self._oldest_first else [min(rows, key=lambda row: len(row.chunks or ()))]

    def _try(
        self,
        rows: tuple[Row, ...],
        width: int | None,
        num_drafts: int | None,
        launch: Callable[[], Pending],
        *,
        commits: bool = True,
    ) -> Iterator[_Launch]:
        longest, begun = max(row.length for row in rows), self._clock()
        try:
            pending = launch()
        except Exception as error:
            self._fail(rows, error)
            return
        for row in rows:
            row.in_flight += commits
            row.num_drafts = num_drafts
        yield _Launch(pending, rows, width or 0, num_drafts, commits, width is not None, longest, begun)

    def _read(self, launch: _Launch) -> None:
        try:
            result = launch.pending.result()
        except Exception as error:
            self._fail(launch.rows, error)
            return
        self._device_seconds += result.seconds or 0.0
        self._time(launch, result.seconds)
        if not launch.commits:
            launch.rows[0].answer.read_prompt(result.logits_of(0))
            return
        accepted, committed = [], 0
        for index, row in enumerate(launch.rows):
            row.in_flight -= 1
            if row.done or row.cancelled:  # it ended before this was known
                continue
            before = len(row.answer.token_ids)
            if self._widths and row.width == AUTO:
                self._widths.read(row.history, result.tokens(index), result.drafts_of(index))
            if not before:
                row.first = self._clock()
                self._prefixes.hold(row.slot, row.answer.prompt)
            count = int(result.accepted[index])
            try:
                pieces = row.answer.commit(
                    result.tokens(index), accepted=count, width=launch.width, logits=result.logits_of(index)
                )
            except Exception as error:  # in its text, its stop strings, its probabilities: nobody else's matter
                self._fail((row,), error)
                continue
            kept = len(row.answer.token_ids) - before
            accepted.append(min(count, kept))
            committed += kept
            self._deliver(row, pieces)
        report = BatchReport(
            width=launch.width,
            accepted=tuple(accepted),
            committed=committed,
            seconds=self._device_seconds,
            is_step=launch.is_step,
        )
        self._device_seconds = 0.0
        self._safely(partial(self._on_batch, report))

    def _time(self, launch: _Launch, measured: float | None) -> None:
        """Notes what a step took: as the engine measured it, else since it could begin."""
        now, earlier = self._clock(), self._newest_read
        self._newest_read = now
        if self._widths and launch.is_step:
            assert launch.num_drafts is not None
            seconds = now - max(launch.begun, earlier) if measured is None else measured
            self._widths.timed(
                Choice(launch.width, launch.num_drafts),
                num_rows=len(launch.rows),
                longest=launch.longest,
                seconds=seconds,
            )

    def _deliver(self, row: Row, pieces: Iterable[Piece]) -> None:
        if row.answer.ended:
            if row.chunks is not None:
                # The last token was not run.
                self._prefixes.hold(row.slot, (*row.answer.prompt, *row.answer.token_ids)[:-1])
            self._finish(row)  # before its caller hears of it: who asks next finds the slot free
            self._report(row)
        for piece in pieces:
            self._tell(row, piece)

    def _fail(self, rows: Iterable[Row], error: Exception) -> None:
        """Ends the rows that the failed launch was for, and no others."""
        self._on_failure(error)
        self._copies += self._prefixes.forget_stored()  # it may have failed for what a place should hold
        told = error if isinstance(error, GraphspecError) else EngineError(f"the engine failed: {error}")
        if told is not error:
            told.__cause__ = error
        for row in rows:
            self._end(row, told)

    def _end(self, row: Row, error: GraphspecError) -> None:
        silent = row.done or row.cancelled
        if row.slot >= 0 and not row.done:
            self._prefixes.forget(row.slot)  # what failed may not have written what it should
        self._finish(row)
        if not silent:
            self._tell(row, error)

    def _finish(self, row: Row) -> None:
        if not row.done:
            row.done = True
            self._dated.pop(row, None)
            if row.slot >= 0:
                self._running.remove(row)
                self._free.add(row.slot)

    def _report(self, row: Row) -> None:
        now = self._clock()
        self._ends.append(now)
        first = row.first if row.answer.token_ids else now
        report = RequestReport(
            num_prompt_tokens=len(row.answer.prompt),
            num_cached_tokens=row.answer.num_cached_tokens,
            queue_time=row.placed - row.added,
            prefill_time=first - row.placed,
            decode_time=now - first,
        )
        self._safely(partial(self._on_answer, report))

    def _tell(self, row: Row, news: Piece | GraphspecError) -> None:
        if not self._safely(partial(row.on_news, news)):
            row.cancelled = True

    def _safely(self, callback: Callable[[], None]) -> bool:
        """Whether a listener took what it was told: one that fails disturbs no request but its own."""
        try:
            callback()
        except Exception as error:
            self._on_failure(error)
            return False
        return True
