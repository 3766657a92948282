"""To whom the time of a run belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graphspec.runtime.bench.recorder import Recorder, Times
from graphspec.runtime.engine import Chunk, StepResult
from graphspec.runtime.sampling import SamplingParams

NONE = np.zeros((1, 1), np.float32)


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Done:
    """A launch that took so long."""

    seconds: float | None

    def result(self) -> StepResult:
        nothing = np.zeros(0, np.int64)
        return StepResult(slots=(), accepted=nothing, committed=nothing, drafts=nothing, seconds=self.seconds)


@dataclass(slots=True)
class Scripted:
    """An engine whose launches take what the test says."""

    seconds: list[float | None]
    num_slots: int = 8
    capacity: int = 64
    num_places: int = 16
    drafts_on_demand: bool = True
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def copy(self, source: int, target: int, length: int) -> None:
        self.calls.append(("copy", source, target, length))

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        self.calls.append(("admit", slot, params, kept))
        del uniform

    def prefill(self, chunk: Chunk) -> Done:
        self.calls.append(("prefill", chunk))
        return Done(self.seconds.pop(0))

    def step(self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False) -> Done:
        self.calls.append(("step", tuple(slots), width, num_drafts, logits))
        return Done(self.seconds.pop(0))

    def drafts(self, slot: int) -> NDArray[np.int64]:
        return np.full(2, slot)

    def close(self) -> None:
        self.calls.append(("close",))


def test_time_until_the_next_launch_belongs_to_the_launch_before() -> None:
    clock, engine = Clock(), Scripted([3.0, 1.5, 1.0, 2.0])
    recorder = Recorder(engine, 2, clock)
    clock.now = 10.0
    recorder.prefill(Chunk(slot=0, tokens=(1,))).result()
    clock.now = 14.0
    recorder.step([0, 1], 3).result()
    clock.now = 16.0
    recorder.step([0], 3).result()
    clock.now = 17.5
    recorder.admit(1, SamplingParams(), NONE, kept=0)  # the next prompt's time begins here
    clock.now = 18.0
    recorder.prefill(Chunk(slot=1, tokens=(1,))).result()
    clock.now = 21.0
    recorder.close()
    assert recorder.times == Times(
        steps=2, rows=3, steps_wall=3.5, steps_device=2.5, prompts_wall=4.0 + 3.5, prompts_device=5.0
    )
    assert ("close",) not in engine.calls


def test_it_is_the_engine_with_fewer_slots() -> None:
    engine = Scripted([1.0])
    recorder = Recorder(engine, 2)
    assert (recorder.num_slots, recorder.capacity, recorder.num_places) == (2, 64, 0)
    assert recorder.drafts(5).tolist() == [5, 5]
    recorder.copy(1, 2, 3)
    recorder.step([1], 2, num_drafts=1, logits=True)
    assert engine.calls == [("copy", 1, 2, 3), ("step", (1,), 2, 1, True)]


def test_times_that_the_engine_does_not_tell_are_counted_as_unknown() -> None:
    recorder = Recorder(Scripted([None, 1.0]), 1)
    recorder.step([0], 0).result()
    recorder.step([0], 0).result()
    assert (recorder.times.unmeasured, recorder.times.steps_device) == (1, 1.0)
    total = Times(steps=5)
    total.add(recorder.times)
    assert (total.steps, total.unmeasured, total.steps_device) == (7, 1, 1.0)
