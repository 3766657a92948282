"""An engine whose tokens are arithmetic, and whose work is done only when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphspec.runtime.engine import NO_TOKEN, Chunk, StepResult
from graphspec.runtime.sampling import SamplingParams

FIRST = 40
"""Tokens are FIRST, FIRST + 1, … for every row: none of them ends an answer."""


def tokens_after(count: int, number: int) -> list[int]:
    """The `number` tokens that follow the first `count` of an answer."""
    return [FIRST + i % 50 for i in range(count, count + number)]


@dataclass
class FakeEngine:
    """Every step accepts `accept(step number)` drafts, up to its width. `log` tells launches and reads in order."""

    num_slots: int = 4
    capacity: int = 512
    accept: Callable[[int], int] = lambda _: 1
    fails_at: frozenset[int] = frozenset()
    """Numbers of launches whose result raises."""
    admitted: Callable[[], object] = lambda: None
    """Called by `admit`: may wait."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._lengths = [0] * self.num_slots
        self._count = 0

    @property
    def drafts_on_demand(self) -> bool:
        return False

    @property
    def num_places(self) -> int:
        return 0

    def copy(self, *_: int) -> None:
        raise AssertionError("it has no places")

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        assert uniform.shape[0] == self.capacity or params.greedy
        self.admitted()
        self.log.append(("admit", slot, kept))
        self._lengths[slot] = 0

    def prefill(self, chunk: Chunk) -> FakePending:
        number = 1 if chunk.next_token == NO_TOKEN else 0
        return self._launch("prefill", (chunk.slot,), 0, {chunk.slot: number})

    def step(
        self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False
    ) -> FakePending:
        assert num_drafts is None or num_drafts >= 0
        assert not logits, "its bundle gives none"
        accepted = min(self.accept(self._count), width)
        return self._launch("step", tuple(slots), width, dict.fromkeys(slots, accepted + 1))

    def drafts(self, slot: int) -> NDArray[np.int64]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def _launch(self, kind: str, slots: tuple[int, ...], width: int, numbers: dict[int, int]) -> FakePending:
        number = self._count
        self._count += 1
        self.log.append((kind, number, slots, width))
        committed = np.full((len(slots), width + 1), NO_TOKEN, np.int64)
        for row, slot in enumerate(slots):
            tokens = tokens_after(self._lengths[slot], numbers[slot])
            committed[row, : len(tokens)] = tokens
            self._lengths[slot] += len(tokens)
        accepted = np.array([max(numbers[slot] - 1, 0) for slot in slots], np.int64)
        drafts = np.array([tokens_after(self._lengths[slot], 4) for slot in slots], np.int64)
        return FakePending(self, number, StepResult(slots=slots, accepted=accepted, committed=committed, drafts=drafts))


@dataclass
class FakePending:
    """A launch of FakeEngine."""

    engine: FakeEngine
    number: int
    outcome: StepResult

    def result(self) -> StepResult:
        self.engine.log.append(("read", self.number))
        if self.number in self.engine.fails_at:
            raise RuntimeError("the device caught fire")
        return self.outcome
