"""The same prompts to every contender, in turn: one process works, all others wait.

    round 1: prompt 1: A B C   prompt 2: B C A   …      round 2: prompt 1: B C A   …

So a machine whose speed drifts slows everybody alike, and nobody is always the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from machine import busy_seconds
from processes import ContenderError, Worker

_WARM_UP_TOKENS = 16
MOST_IDLE = 0.02
"""Share of a core that a contender may use while it waits, before the report says so."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt's token ids."""

    id: str
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer; seconds."""

    prompt: str
    category: str
    round: int
    tokens: tuple[int, ...]
    """An ending EOS included."""
    seconds: float
    first_seconds: float
    first_tokens: int
    more: Mapping[str, Any]
    """steps, and of ours steps_seconds and device_seconds."""


@dataclass(slots=True, kw_only=True)
class Result:
    """All that one contender did."""

    about: Mapping[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failure: str = ""
    waited: float = 0.0
    """Seconds in which another one worked,"""
    waited_cpu: float = 0.0
    """and the processor time that it used meanwhile."""

    @property
    def idle_share(self) -> float:
        """Of a core, while it waited."""
        return self.waited_cpu / self.waited if self.waited else 0.0


@dataclass(slots=True, kw_only=True)
class Measured:
    """Every contender's result, by name, and how busy the cores were with other work."""

    results: dict[str, Result]
    seconds: float = 0.0
    """In which somebody worked."""
    others_seconds: float = 0.0
    """Processor time of everything else on these cores in that time."""

    def others_share(self, cores: Collection[int]) -> float:
        """Of the cores."""
        return self.others_seconds / (self.seconds * len(cores)) if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked."""

    asked: Sequence[Asked]
    rounds: int
    max_new_tokens: int
    eos: Sequence[int]
    cores: Collection[int]
    pause: float = 0.2
    """Seconds before each request, in which the threads of the one before fall asleep."""


def measure(
    starts: Mapping[str, Callable[[], Worker]], plan: Plan, on_progress: Callable[[str], None] = lambda _: None
) -> Measured:
    """Starts everybody, then asks. One that fails is out, with its reason; the others go on."""
    measured = Measured(results={name: Result() for name in starts})
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, start in starts.items():
            on_progress(f"starting {name}")
            try:
                workers[name] = stack.enter_context(start())
                measured.results[name].about = workers[name].about()
                workers[name].ask(_request(plan.asked[0], min(_WARM_UP_TOKENS, plan.max_new_tokens), plan.eos))
            except ContenderError as error:
                _give_up(workers, measured.results[name], name, error)
        for number, asked, name in _turns(plan, list(starts)):
            if name in workers:
                on_progress(f"round {number + 1} of {plan.rounds}, {asked.id}: {name}")
                _one(workers, measured, plan, (number, asked, name))
    return measured


def _one(workers: dict[str, Worker], measured: Measured, plan: Plan, turn: tuple[int, Asked, str]) -> None:
    number, asked, name = turn
    time.sleep(plan.pause)
    before = {each: worker.cpu_seconds() for each, worker in workers.items()}
    begun, busy = time.perf_counter(), busy_seconds(plan.cores)
    try:
        answer = workers[name].ask(_request(asked, plan.max_new_tokens, plan.eos))
    except ContenderError as error:
        _give_up(workers, measured.results[name], name, error)
        return
    seconds, busy = time.perf_counter() - begun, busy_seconds(plan.cores) - busy
    used = {each: worker.cpu_seconds() - before[each] for each, worker in workers.items()}
    measured.seconds += seconds
    measured.others_seconds += max(busy - sum(used.values()), 0.0)
    for each in workers:
        if each != name:
            measured.results[each].waited += seconds
            measured.results[each].waited_cpu += used[each]
    measured.results[name].samples.append(_sample(number, asked, answer))


def _turns(plan: Plan, names: Sequence[str]) -> Iterator[tuple[int, Asked, str]]:
    turn = 0
    for number in range(plan.rounds):
        turn = number
        for asked in plan.asked:
            first = turn % len(names)
            yield from ((number, asked, name) for name in [*names[first:], *names[:first]])
            turn += 1


def _request(asked: Asked, max_new_tokens: int, eos: Sequence[int]) -> dict[str, Any]:
    return {"generate": {"ids": list(asked.ids), "max_new_tokens": max_new_tokens, "eos": list(eos)}}


def _sample(number: int, asked: Asked, answer: dict[str, Any]) -> Sample:
    known = {name: answer.pop(name) for name in ("tokens", "seconds", "first_seconds", "first_tokens")}
    known["tokens"] = tuple(known["tokens"])
    return Sample(prompt=asked.id, category=asked.category, round=number, **known, more=answer)


def _give_up(workers: dict[str, Worker], result: Result, name: str, error: ContenderError) -> None:
    result.failure = str(error)
    if worker := workers.pop(name, None):
        worker.close()
