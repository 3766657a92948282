"""Requests that come, stop, are cancelled and run out of time while others run: drawn by hypothesis, then played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from driven import Asked, Driven, expected
from hypothesis import strategies as st
from virtual_device import VOCABULARY, VirtualDevice

from graphspec.runtime.loop import Policy
from graphspec.runtime.width_policy import Width, WidthPolicy

BEGINNINGS = ((1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9), (9,), (9, 9, 9, 9, 9, 9))
"""Of prompts: some begin like others, so that slots are used again for them."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One request. Turns are counted from the start; a deadline is in seconds from its arrival."""

    prompt: tuple[int, ...]
    arrives: int
    width: int
    seed: int
    chunk_size: int
    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    client: str | None = None
    cancelled: int | None = None
    """In which turn."""
    patience: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Visits to a device of some slots; drafts are wrong at each `wrong`-th position."""

    visits: tuple[Visit, ...]
    num_slots: int = 2
    wrong: int = 4
    policy: Policy = field(default_factory=Policy)
    step_time: float = 1.0
    host_time: float = 0.0


VISITS = st.builds(
    Visit,
    prompt=st.tuples(st.sampled_from(BEGINNINGS), st.lists(st.integers(0, VOCABULARY - 1), max_size=6).map(tuple)).map(
        lambda parts: parts[0] + parts[1]
    ),
    arrives=st.integers(0, 20),
    width=st.integers(0, 3),
    seed=st.integers(0, 3),
    chunk_size=st.sampled_from([1, 2, 3, 50]),
    max_new_tokens=st.one_of(st.integers(0, 12), st.just(None)),
    stop_token_ids=st.sets(st.integers(0, VOCABULARY - 1), max_size=8).map(lambda ids: tuple(sorted(ids))),
    ignore_eos=st.booleans(),
    client=st.sampled_from([None, None, "a"]),
    cancelled=st.one_of(st.none(), st.none(), st.integers(0, 40)),
    patience=st.one_of(st.none(), st.none(), st.floats(0.5, 30)),
)
POLICIES = st.builds(Policy, overlap=st.booleans(), prompts_first=st.booleans(), reuse_prefixes=st.booleans())
SCENARIOS = st.builds(
    Scenario,
    visits=st.lists(VISITS, min_size=1, max_size=6).map(tuple),
    num_slots=st.integers(1, 3),
    wrong=st.integers(1, 6),
    policy=POLICIES,
    step_time=st.sampled_from([0.0, 1.0]),
    host_time=st.sampled_from([0.0, 0.3, 2.0]),
)
MAX_LENGTH = 40


def play(
    scenario: Scenario,
    watch: Callable[[Driven], None] = lambda _: None,
    *,
    width: Callable[[int], Width] | None = None,
    widths: WidthPolicy | None = None,
) -> Driven:
    """Until everything has ended; `watch` is called after every turn. No launch may fail. `width`: of each visit by
    its number, in place of its own."""
    wrong = scenario.wrong
    device = VirtualDevice(
        num_slots=scenario.num_slots,
        capacity=MAX_LENGTH + 12,
        step_time=scenario.step_time,
        right=lambda position: position % wrong != 0,
    )
    driven = Driven(device, scenario.policy, host_time=scenario.host_time, max_length=MAX_LENGTH, widths=widths)
    asked, turn = dict[int, Asked](), 0
    while len(asked) < len(scenario.visits) or not driven.loop.idle:
        for number, visit in enumerate(scenario.visits):
            if visit.arrives == turn:
                asked[number] = _arrive(driven, visit, visit.width if width is None else width(number))
            if visit.cancelled == turn and number in asked and not asked[number].ended:
                driven.cancel(asked[number])
        driven.turn()
        watch(driven)
        turn += 1
        assert turn < 5000, "it does not end"
    assert not driven.failures, driven.failures
    driven.asked = [asked[number] for number in range(len(scenario.visits))]
    return driven


def untroubled(scenario: Scenario) -> Scenario:
    """The same without anybody who is cancelled or has no time."""
    return replace(scenario, visits=tuple(replace(one, cancelled=None, patience=None) for one in scenario.visits))


def outcome(asked: Asked) -> tuple[list[int], str]:
    """As `driven.expected` gives it."""
    found = asked.generation
    return list(found.token_ids), found.finish_reason


def right(asked: Asked) -> bool:
    """Whether a request came to the end that it has alone; one that was cancelled or late, as far as it came."""
    tokens, reason = expected(asked, room=MAX_LENGTH - len(asked.prompt))
    told = [token for piece in asked.pieces for token in piece.token_ids]
    if asked.cancelled or asked.error is not None or asked.generation.stop_reason == "timeout":
        return told == tokens[: len(told)]
    return outcome(asked) == (tokens, reason)


def _arrive(driven: Driven, visit: Visit, width: Width) -> Asked:
    return driven.ask(
        visit.prompt,
        width=width,
        chunk_size=visit.chunk_size,
        client=visit.client,
        deadline=None if visit.patience is None else driven.clock.now + visit.patience,
        seed=visit.seed,
        max_new_tokens=visit.max_new_tokens,
        stop_token_ids=visit.stop_token_ids,
        ignore_eos=visit.ignore_eos,
    )
