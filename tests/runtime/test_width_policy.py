"""The width of the next step: chances of drafts, times of steps, and what both make of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from driven import Driven
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import MAX_LENGTH, SCENARIOS, Scenario, outcome, play, right, untroubled
from virtual_device import VirtualDevice, continuation

from graphspec.errors import RequestError
from graphspec.runtime.engine import NO_TOKEN
from graphspec.runtime.loop import Policy
from graphspec.runtime.step_times import BURST
from graphspec.runtime.width_policy import (
    AUTO,
    AdaptiveWidths,
    Candidate,
    Choice,
    History,
    WidthPolicy,
    best_width,
    checked_width,
    expected_tokens,
)
from graphspec.verify_width import WidthSchedule

K = 4
WIDTHS = tuple(range(K + 1))
CHANCES = st.lists(st.floats(0, 1), max_size=6)
few = settings(deadline=None, max_examples=40)


@given(survival=CHANCES, width=st.integers(0, 8))
def test_a_row_commits_its_own_token_and_each_draft_with_its_chance(survival: list[float], width: int) -> None:
    assert expected_tokens(survival, width) == pytest.approx(1 + sum(p for i, p in enumerate(survival) if i < width))
    assert 1 <= expected_tokens(survival, width) <= expected_tokens(survival, width + 1) <= width + 2


@given(
    rows=st.lists(CHANCES, min_size=1, max_size=4),
    seconds=st.dictionaries(st.integers(0, 6), st.floats(0.01, 10), min_size=1),
    scale=st.sampled_from([0.25, 2.0, 8.0]),
)
def test_the_best_width_commits_most_tokens_a_second(
    rows: list[list[float]], seconds: dict[int, float], scale: float
) -> None:
    def rate(width: int) -> float:
        return sum(1 + sum(row[:width]) for row in rows) / seconds[width]

    best = best_width(rows, seconds)
    assert rate(best) == pytest.approx(max(map(rate, seconds)))
    assert best == best_width(rows, {width: scale * cost for width, cost in seconds.items()})
    assert best == best_width(rows * 2, seconds)


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=5))
def test_without_a_draft_nothing_is_verified_that_costs_time(steps: list[float]) -> None:
    assert best_width([[], []], dict(enumerate(sorted(steps)))) == 0


def history_after(policy: WidthPolicy, outcomes: Sequence[tuple[list[int], list[int]]]) -> History:
    """Of a row that read its prompt and then steps, each launched when all before it was known."""
    history = History()
    for number, (tokens, drafts) in enumerate(outcomes):
        if number:
            policy.choose([Candidate(history, 100, read=True)])
        policy.read(history, tokens, drafts)
    return history


def test_drafts_are_judged_by_tokens_that_came_later_at_any_width() -> None:
    """[7, 8, 9, 1] was proposed after 6, at width 0: 7 and 8 came, 9 did not. What a step that verifies all of them
    would have told."""
    policy = AdaptiveWidths(WIDTHS)
    none = [NO_TOKEN] * K
    history = history_after(policy, [([6], [7, 8, 9, 1]), ([7], none), ([8], none), ([5], none)])
    chances = [history.chances.at(1, position, prior=0.5, weight=1e-6) for position in range(K)]
    assert chances == pytest.approx([1, 1, 0, 0.5], abs=1e-4)
    wide = AdaptiveWidths(WIDTHS)
    at_once = history_after(wide, [([6], [7, 8, 9, 1]), ([7, 8, 5], none)])
    assert [at_once.chances.at(1, p, prior=0.5, weight=1e-6) for p in range(K)] == pytest.approx(chances)


def test_a_row_that_proposes_nothing_is_worth_nothing_where_that_is_known_in_time() -> None:
    policy = AdaptiveWidths(WIDTHS)
    for _ in range(3):  # drafts that are always right
        history_after(policy, [([1], [2] * K), *[([2] * (K + 1), [2] * K)] * 30])
    history = history_after(policy, [([1], [2] * K), *[([2] * (K + 1), [2] * K)] * 30, ([2], [NO_TOKEN] * K)])
    fresh = History(drafts=(), streak=9)
    for each in (history, fresh):
        assert policy.choose([Candidate(each, 100, read=True)]).width == 0
    assert policy.choose([Candidate(History(drafts=(2,) * K, streak=9), 100, read=True)]).width == K


def test_what_the_answer_cannot_take_is_not_verified() -> None:
    policy = AdaptiveWidths(WIDTHS)
    history = history_after(policy, [([1], [2] * K), *[([2] * (K + 1), [2] * K)] * 3])
    assert [policy.choose([Candidate(history, left, read=True)]).width for left in (1, 3, 20)] == [0, 2, K]


@dataclass
class Coin:
    """A row whose drafts are right with a chance each; `cost` of a step by its width, in seconds, and of each draft
    that is asked for."""

    chance: Callable[[int], float]
    cost: Callable[[int], float]
    draft_cost: float = 0.0
    noise: float = 0.05
    seed: int = 0

    def run(self, policy: WidthPolicy | int, steps: int, asked: list[int] | None = None) -> float:
        """→ seconds a token; `asked` gets the drafts that each step was asked for."""
        draw, taken, tokens = random.Random(self.seed), 0.0, 0
        history, drafts = History(), [1] * K
        if not isinstance(policy, int):
            policy.read(history, [0], drafts)
        for step in range(steps):
            width = num_drafts = policy if isinstance(policy, int) else 0
            if not isinstance(policy, int):
                width, num_drafts = policy.choose([Candidate(history, 10**6, read=True)])
            truth = [1 if draw.random() < self.chance(step) else 2 for _ in range(K + 1)]
            verified = min(width, len(drafts))
            accepted = next((i for i in range(verified) if truth[i] != 1), verified)
            spent = self.cost(width) + num_drafts * self.draft_cost
            drafts = [1] * num_drafts
            (asked if asked is not None else []).append(num_drafts)
            seen = spent * (1 + draw.gauss(0, self.noise)) * (4 if draw.random() < 0.1 else 1)
            taken, tokens = taken + spent, tokens + accepted + 1
            if not isinstance(policy, int):
                policy.read(history, truth[: accepted + 1], drafts)
                policy.timed(Choice(width, num_drafts), num_rows=1, longest=step, seconds=seen)
        return taken / tokens


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("each", [0.01, 0.1, 0.5])
def test_it_is_nearly_as_fast_as_the_best_width(chance: float, each: float) -> None:
    """But for probes, each of which costs no more than what is wasted at the widest width, or gained at the best."""
    steps = 1500
    coin = Coin(chance=lambda _: chance, cost=lambda width: 1 + each * width)
    best = min(coin.run(width, steps) for width in WIDTHS)
    probes = BURST * (6 + steps / 256) / steps
    assert coin.run(AdaptiveWidths(WIDTHS), steps) <= (1.03 + probes * max(each * K, 1)) * best


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("each", [0.01, 0.1, 0.3])
def test_it_is_so_too_where_only_drafts_that_are_asked_for_are_made(chance: float, each: float) -> None:
    """Beside probes, one step in 16 asks for all of them."""
    steps = 1500
    coin = Coin(chance=lambda _: chance, cost=lambda width: 1 + each / 2 * width, draft_cost=each / 2)
    best = min(coin.run(width, steps) for width in WIDTHS)
    probes = BURST * (6 + steps / 256) / steps
    adaptive = coin.run(AdaptiveWidths(WIDTHS, on_demand=True), steps)
    assert adaptive <= (1.04 + probes * max(each * K, 1) + each / 2 * K / 16) * best


def test_it_asks_for_the_drafts_that_it_is_going_to_verify() -> None:
    """Of drafts that are always wrong it asks for none, and still notices when they become right."""
    policy, asked = AdaptiveWidths(WIDTHS, on_demand=True), list[int]()
    coin = Coin(chance=lambda step: float(step >= 1000), cost=lambda width: 1 + 0.1 * width, draft_cost=0.1)
    coin.run(policy, 2000, asked)
    assert sum(asked[500:1000]) / 500 < 0.1 * K
    assert sum(asked[1500:]) / 500 > 0.8 * K


def test_it_follows_drafts_that_get_better_and_worse() -> None:
    coin = Coin(chance=lambda step: 0.95 if step // 150 % 2 else 0.02, cost=lambda width: 1 + 0.25 * width)
    best = min(coin.run(width, 1500) for width in WIDTHS)
    assert coin.run(AdaptiveWidths(WIDTHS), 1500) < 0.92 * best


class Anything:
    """A policy that chooses at random."""

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        self._widths, self._draw = widths, random.Random(seed)
        self.used: set[int] = set()

    def choose(self, rows: Sequence[Candidate]) -> Choice:
        assert rows
        self.used.add(width := self._draw.choice(self._widths))
        return Choice(width, self._draw.choice(self._widths))

    def read(self, history: History, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        assert history.drafts is None
        assert tokens
        assert len(drafts) <= 3

    def timed(self, choice: Choice, *, num_rows: int, longest: int, seconds: float) -> None:
        assert {*choice} <= {*self._widths}
        assert num_rows <= 3
        assert seconds >= 0
        assert longest <= MAX_LENGTH + 12


@few
@given(scenario=SCENARIOS, seed=st.one_of(st.none(), st.integers(0, 99)), named=st.integers(0, 3))
def test_answers_do_not_depend_on_the_policy(scenario: Scenario, seed: int | None, named: int) -> None:
    """Rows that name a width among rows that name none; None: the policy that is used."""
    scenario = untroubled(scenario)
    policy = AdaptiveWidths(range(4)) if seed is None else Anything(range(4), seed)
    chosen = play(scenario, width=lambda number: 2 if number == named else AUTO, widths=policy)
    assert all(right(asked) for asked in chosen.asked)
    assert [outcome(asked) for asked in chosen.asked] == [outcome(asked) for asked in play(scenario).asked]


@few
@given(scenario=SCENARIOS, seed=st.one_of(st.none(), st.integers(0, 99)))
def test_nor_where_requests_are_cancelled_or_late(scenario: Scenario, seed: int | None) -> None:
    policy = AdaptiveWidths(range(4)) if seed is None else Anything(range(4), seed)
    assert all(right(asked) for asked in play(scenario, width=lambda _: AUTO, widths=policy).asked)


@pytest.mark.parametrize("on_demand", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_loop_steps_wide_while_drafts_are_right_and_not_at_all_while_they_are_wrong(
    overlap: bool, on_demand: bool
) -> None:
    """On the virtual device every step takes as long, but one that verifies drafts a little longer."""

    def run(right: Callable[[int], bool]) -> list[int]:
        device = VirtualDevice(right=right, num_drafts=K, step_time=1.0, draft_time=0.1, drafts_on_demand=on_demand)
        driven = Driven(device, Policy(overlap=overlap), widths=AdaptiveWidths(WIDTHS, on_demand=on_demand))
        asked = driven.ask(width=AUTO, max_new_tokens=150, ignore_eos=True)
        driven.run()
        assert list(asked.generation.token_ids) == continuation(asked.prompt, 0, 150)
        return [span.width for span in device.spans if span.kind == "step"]

    wide, narrow = run(lambda _: True), run(lambda _: False)
    assert sum(wide) > 0.7 * K * len(wide)
    assert sum(width > 0 for width in narrow) < 25


@few
@given(scenario=SCENARIOS, named=st.integers(0, 5))
def test_a_schedule_goes_by_the_rows_that_are_stepped_at_once(scenario: Scenario, named: int) -> None:
    """Of rows of a schedule; and beside one that names a width, which counts too."""
    schedule = WidthSchedule.parse("1:3,2:1,3:0")
    played = play(scenario, width=lambda _: schedule)
    assert all(right(asked) for asked in played.asked)
    for span in played.device.spans:
        assert span.kind != "step" or span.width == {1: 3, 2: 1, 3: 0}[len(span.slots)]
    mixed = play(scenario, width=lambda number: 2 if number == named else schedule)
    assert all(right(asked) for asked in mixed.asked)


def test_rows_of_another_width_count_in_a_schedule() -> None:
    driven = Driven(VirtualDevice(num_slots=3), Policy(overlap=False, prompts_first=True))
    schedule = WidthSchedule.parse("1:3,3:0")
    for width in (schedule, schedule, 2):
        driven.ask(width=width, max_new_tokens=30, ignore_eos=True)
    driven.turn()
    assert [(span.width, len(span.slots)) for span in driven.device.spans if span.kind == "step"] == [(0, 2), (2, 1)]


def test_what_a_bundle_has_is_taken_and_nothing_else() -> None:
    widths = (0, 2, 4)
    schedule = WidthSchedule.parse("1:4,8:0")
    assert [checked_width(width, widths) for width in (None, 2, AUTO, schedule)] == [4, 2, AUTO, schedule]
    assert checked_width("8:0,1:4", widths) == schedule
    with pytest.raises(RequestError, match=r"width 3 of the schedule 1:4,8:3 is not in this bundle; .* for 0, 2, 4"):
        checked_width("1:4,8:3", widths)
    with pytest.raises(RequestError, match="width: the first range starts at batch size 2"):
        checked_width("2:4", widths)


def test_a_loop_without_a_policy_takes_no_such_row() -> None:
    with pytest.raises(ValueError, match="has no width policy"):
        Driven().ask(width=AUTO)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_schedule_verifies_no_more_than_was_drafted(overlap: bool) -> None:
    """Two rows have no drafts; the one that is left has none in its first step alone, and it is none that verifies."""
    device = VirtualDevice(right=lambda _: True, num_drafts=K, drafts_on_demand=True)
    driven = Driven(device, Policy(overlap=overlap))
    schedule = WidthSchedule.parse(f"1:{K},2:0")
    _, left = (driven.ask(width=schedule, max_new_tokens=count, ignore_eos=True) for count in (20, 60))
    driven.run()
    assert list(left.generation.token_ids) == continuation(left.prompt, 0, 60)
    assert left.generation.acceptance.verifications > 5
    assert left.generation.acceptance.conditional_acceptance_per_position[0] == 1
    assert [span.width for span in device.spans if span.slots == (left.row.slot,) and span.kind == "step"].count(0) <= 2


def test_a_schedule_takes_all_that_is_drafted_in_any_case() -> None:
    device = VirtualDevice(right=lambda _: True, num_drafts=K)
    driven = Driven(device)
    schedule = WidthSchedule.parse(f"1:{K},2:0")
    for count in (20, 60):
        driven.ask(width=schedule, max_new_tokens=count, ignore_eos=True)
    driven.run()
    steps = [span for span in device.spans if span.kind == "step"]
    assert {(len(span.slots), span.width) for span in steps} == {(2, 0), (1, K)}
