"""An engine that notes what its launches cost, and to whom the time between them belongs.

    launch prompt ─ device ─ host ─┬─ launch step ─ device ─ host ─┬─ launch step …
            prompts' wall          │          steps' wall          │

The loop must read each launch before the next (no overlap): then a launch's wall time lasts until the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..engine import Chunk, Engine, Pending, StepResult
from ..sampling import SamplingParams

_Kind = Literal["prompts", "steps"]


@dataclass(slots=True, kw_only=True)
class Times:
    """Of some launches; seconds."""

    steps: int = 0
    rows: int = 0
    """Of all steps together."""
    steps_wall: float = 0.0
    steps_device: float = 0.0
    prompts_wall: float = 0.0
    prompts_device: float = 0.0
    unmeasured: int = 0
    """Launches whose device time the engine does not tell."""

    def add(self, other: Times) -> None:
        """Counts the other's launches too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Recorder:
    """The engine with `num_slots` of its slots: a loop over it runs batches of that size."""

    def __init__(self, engine: Engine, num_slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.times = Times()
        self._engine, self._num_slots, self._clock = engine, num_slots, clock
        self._kind: _Kind | None = None
        self._since = 0.0

    @property
    def num_slots(self) -> int:
        """Those in use."""
        return self._num_slots

    @property
    def capacity(self) -> int:
        """The engine's."""
        return self._engine.capacity

    @property
    def drafts_on_demand(self) -> bool:
        """The engine's."""
        return self._engine.drafts_on_demand

    @property
    def num_places(self) -> int:
        """None: every prompt is to be run."""
        return 0

    def copy(self, source: int, target: int, length: int) -> None:
        """The engine's."""
        self._engine.copy(source, target, length)

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        """The prompt's time begins."""
        self._enter("prompts")
        self._engine.admit(slot, params, uniform, kept=kept)

    def prefill(self, chunk: Chunk) -> Pending:
        """Part of the prompt's time."""
        self._enter("prompts")
        return _Noted(self._engine.prefill(chunk), self.times, "prompts")

    def step(self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False) -> Pending:
        """The step's time begins."""
        self._enter("steps")
        self.times.steps += 1
        self.times.rows += len(slots)
        launched = self._engine.step(slots, width, num_drafts=num_drafts, logits=logits)
        return _Noted(launched, self.times, "steps")

    def drafts(self, slot: int) -> NDArray[np.int64]:
        """The engine's."""
        return self._engine.drafts(slot)

    def close(self) -> None:
        """The last launch's time is over; the engine stays open."""
        self._enter(None)

    def _enter(self, kind: _Kind | None) -> None:
        now = self._clock()
        if self._kind == "prompts":
            self.times.prompts_wall += now - self._since
        elif self._kind == "steps":
            self.times.steps_wall += now - self._since
        self._kind, self._since = kind, now


@dataclass(frozen=True, slots=True)
class _Noted:
    """A launch whose device time is noted when it is read."""

    pending: Pending
    times: Times
    kind: _Kind

    def result(self) -> StepResult:
        result = self.pending.result()
        if result.seconds is None:
            self.times.unmeasured += 1
        elif self.kind == "steps":
            self.times.steps_device += result.seconds
        else:
            self.times.prompts_device += result.seconds
        return result
