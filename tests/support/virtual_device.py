"""A device on a clock of its own, whose model is arithmetic over everything a row has seen.

Launches take device time, one after the other; launching, and what the test's callbacks do, takes host time. Nothing
sleeps. A token depends on the whole row before it and on the draw at its position, so that a row whose cache is not
exactly its own request's gives other tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from graphspec.runtime.engine import NO_TOKEN, Chunk, StepResult
from graphspec.runtime.sampling import SamplingParams, uniform_table

VOCABULARY = 64


@dataclass
class Clock:
    """Seconds, as the test says."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)


def next_token(before: Sequence[int], draw: float) -> int:
    """What the model says after `before`."""
    return zlib.crc32(bytes(before) + int(draw * 2**24).to_bytes(4, "big")) % VOCABULARY


def continuation(prompt: Sequence[int], seed: int, number: int) -> list[int]:
    """The first tokens of the answer, one at a time and without a device."""
    table, tokens = uniform_table(seed, len(prompt) + number), list(prompt)
    for _ in range(number):
        tokens.append(next_token(tokens, float(table[len(tokens), 0])))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Span:
    """One launch: what it was, and when the device was at it."""

    kind: str
    slots: tuple[int, ...]
    width: int
    start: float
    end: float


@dataclass
class _Row:
    cache: list[int] = field(default_factory=list)
    table: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 1), np.float32))
    pending: int = NO_TOKEN
    drafts: list[int] = field(default_factory=list)


@dataclass
class VirtualDevice:
    """An engine. `right` says whether the draft for a position is the model's token."""

    clock: Clock = field(default_factory=Clock)
    num_slots: int = 4
    capacity: int = 256
    num_drafts: int = 3
    prefill_time: float = 1.0
    """Seconds of a chunk, whatever its size."""
    step_time: float = 1.0
    draft_time: float = 0.0
    """What each draft verified adds to a step."""
    drafts_on_demand: bool = False
    """Proposes no more than it is asked for, and `draft_time` is what each of those adds too."""
    launch_time: float = 0.0
    """Seconds of the host for each launch."""
    right: Callable[[int], bool] = lambda position: position % 5 != 0
    fails: Callable[[int], bool] = lambda _: False
    """Whether the result of a launch, by its number, is an error."""
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = [_Row() for _ in range(self.num_slots)]
        self._places = dict[int, list[int]]()

    @property
    def gaps(self) -> list[float]:
        """Seconds that the device had nothing to do before each launch but the first."""
        return [after.start - before.end for before, after in pairwise(self.spans)]

    def written(self, slot: int) -> int:
        """Positions of the slot's cache that hold committed tokens."""
        return len(self._rows[slot].cache)

    @property
    def num_places(self) -> int:
        return self.num_slots + 3

    def copy(self, source: int, target: int, length: int) -> None:
        cache = self._rows[source].cache if source < self.num_slots else self._places.get(source, [])
        assert length <= len(cache), "it never held so much"
        if target < self.num_slots:
            self._rows[target] = _Row(cache=cache[:length])
        else:
            self._places[target] = cache[:length]

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        row = self._rows[slot]
        assert kept <= len(row.cache), "the slot never held so much"
        assert params is not None
        self._rows[slot] = _Row(cache=row.cache[:kept], table=uniform)

    def prefill(self, chunk: Chunk) -> VirtualPending:
        row = self._rows[chunk.slot]
        assert row.pending == NO_TOKEN, "the prompt has been read"
        assert min(chunk.tokens) >= 0, "no embedding is at -1"
        row.cache += chunk.tokens
        tokens = [] if chunk.next_token != NO_TOKEN else [self._sample(row, row.cache)]
        if tokens:
            row.pending = tokens[0]
            self._draft(row, self._count(chunk.num_drafts))
        return self._launched("prefill", (chunk.slot,), 0, self.prefill_time, [tokens])

    def step(
        self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False
    ) -> VirtualPending:
        assert not logits, "it has none"
        assert len(set(slots)) == len(slots) > 0
        asked = self._count(num_drafts)
        committed = [self._verify(self._rows[slot], width, asked) for slot in slots]
        seconds = self.step_time + (width + asked * self.drafts_on_demand) * self.draft_time
        return self._launched("step", tuple(slots), width, seconds, committed)

    def drafts(self, slot: int) -> NDArray[np.int64]:
        return np.array([self._rows[slot].pending, *self._rows[slot].drafts])

    def close(self) -> None:
        raise AssertionError("the engine is its owner's")

    def _count(self, num_drafts: int | None) -> int:
        return self.num_drafts if num_drafts is None or not self.drafts_on_demand else num_drafts

    def _verify(self, row: _Row, width: int, asked: int) -> list[int]:
        assert row.pending >= 0, "a row was stepped before its prompt was read"
        assert len(row.cache) + 1 + width <= self.capacity, "written beyond the end of the cache"
        tokens, seen = list[int](), [*row.cache, row.pending]
        for draft in [*row.drafts[:width], NO_TOKEN]:
            tokens.append(self._sample(row, [*seen, *tokens]))
            if tokens[-1] != draft:
                break
        row.cache = [*seen, *tokens[:-1]]
        row.pending = tokens[-1]
        self._draft(row, asked)
        return tokens

    def _draft(self, row: _Row, count: int) -> None:
        seen, row.drafts = [*row.cache, row.pending], []
        for _ in range(count):
            token = self._sample(row, seen) if len(seen) < self.capacity else 0
            row.drafts.append(token if self.right(len(seen)) else (token + 1) % VOCABULARY)
            seen.append(row.drafts[-1])

    def _sample(self, row: _Row, seen: Sequence[int]) -> int:
        return next_token(seen, float(row.table[len(seen), 0]))

    def _launched(
        self, kind: str, slots: tuple[int, ...], width: int, seconds: float, tokens: list[list[int]]
    ) -> VirtualPending:
        self.clock.now += self.launch_time
        start = max(self.clock.now, self.spans[-1].end if self.spans else 0.0)
        self.spans.append(Span(kind, slots, width, start, start + seconds))
        committed = np.full((len(slots), width + 1), NO_TOKEN, np.int64)
        for line, found in zip(committed, tokens, strict=True):
            line[: len(found)] = found
        accepted = np.array([max(len(found) - 1, 0) for found in tokens], np.int64)
        drafts = [self._rows[slot].drafts for slot in slots]
        if kind == "prefill" and not tokens[0]:
            drafts = [[NO_TOKEN] * self.num_drafts]
        outcome = StepResult(slots=slots, accepted=accepted, committed=committed, drafts=np.array(drafts))
        return VirtualPending(self.clock, start + seconds, outcome, self.fails(len(self.spans) - 1))


@dataclass(frozen=True)
class VirtualPending:
    """A launch, done when the clock says so."""

    clock: Clock
    end: float
    outcome: StepResult
    failed: bool

    def result(self) -> StepResult:
        self.clock.wait_until(self.end)
        if self.failed:
            raise RuntimeError("the device caught fire")
        return self.outcome
