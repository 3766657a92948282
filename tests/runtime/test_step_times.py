"""What steps cost, from steps that were timed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.runtime.step_times import BURST, StepTimes, costs


def timed(steps: dict[int, float], *, rows: int = 1, times: StepTimes | None = None) -> StepTimes:
    """A step of each width."""
    times = times or StepTimes()
    for width, seconds in steps.items():
        times.add(width=width, num_rows=rows, longest=100, seconds=seconds)
    return times


def test_a_few_slow_steps_change_nothing() -> None:
    times = StepTimes()
    for number in range(16):
        for width in (0, 4):
            seconds = (1.0 + width / 10) * (9 if number % 5 == width else 1)
            times.add(width=width, num_rows=1, longest=50, seconds=seconds)
    assert times.of([0, 4], 1) == pytest.approx({0: 1.0, 4: 1.4})


@given(base=st.floats(0.1, 10), draft=st.floats(0, 1), timed_at=st.sets(st.integers(0, 12), min_size=2, max_size=5))
def test_widths_that_were_not_timed_stand_on_the_line_through_those_that_were(
    base: float, draft: float, timed_at: set[int]
) -> None:
    times = timed({width: base + draft * width for width in timed_at})
    found = times.of(range(13), 1)
    assert all(found[width] == pytest.approx(base + draft * width) for width in timed_at)
    assert all(seconds > 0 for seconds in found.values())
    lowest = min(timed_at)
    assert all(found[width] == pytest.approx(base + draft * width) for width in range(lowest, 13))


@given(slope=st.floats(0, 0.1), cost=st.floats(0.1, 5), gap=st.integers(0, 5000))
def test_a_width_that_was_last_used_in_a_shorter_context_is_not_taken_for_a_cheap_one(
    slope: float, cost: float, gap: int
) -> None:
    """Width 0 at lengths from 0 on, width 4 `gap` positions later."""
    samples = {
        0: [(float(length), 1 + slope * length) for length in range(10)],
        4: [(float(length), 1 + cost + slope * length) for length in range(gap, gap + 10)],
    }
    found = costs(samples)
    assert found[4] - found[0] == pytest.approx(cost, rel=1e-3, abs=1e-3)


def test_what_was_never_timed_is_taken_to_cost_a_little_for_each_draft() -> None:
    nothing, one = StepTimes().of([0, 2, 4], 1), timed({4: 2.4}).of([0, 2, 4], 1)
    for found in (nothing, one):
        assert found[0] < found[2] < found[4] < 1.5 * found[0]
    assert one[4] == 2.4


def test_a_number_of_rows_without_times_has_those_of_the_nearest() -> None:
    times = timed({0: 1.0, 4: 1.2}, rows=1)
    timed({0: 2.0, 4: 4.0}, rows=8, times=times)
    timed({4: 100.0}, rows=5, times=times)
    assert times.of([0, 4], 2) == pytest.approx({0: 1.0, 4: 1.2})
    assert times.of([0, 4], 5) == times.of([0, 4], 8) == pytest.approx({0: 2.0, 4: 4.0})


@settings(deadline=None, max_examples=30)
@given(steps=st.integers(1, 5000), widths=st.sets(st.integers(0, 8), min_size=1, max_size=5))
def test_probes_are_as_few_as_is_promised(steps: int, widths: set[int]) -> None:
    times, listed, count = StepTimes(), sorted(widths), 0
    for _ in range(steps):
        probed = times.probe(listed, 3)
        count += probed is not None
        assert probed is None or probed in widths
        times.add(width=listed[0] if probed is None else probed, num_rows=3, longest=1, seconds=1.0)
    assert count <= BURST * (6 + steps / 256)
    assert count <= BURST * (1 + max(0.0, math.log2(steps / 8)) + steps / 256)


def test_probes_are_of_what_was_timed_longest_ago_and_first_of_the_ends() -> None:
    times, order = StepTimes(), list[int]()
    for _ in range(700):
        probed = times.probe([0, 1, 2], 1)
        if probed is not None and (not order or order[-1] != probed):
            order.append(probed)
        times.add(width=0 if probed is None else probed, num_rows=1, longest=1, seconds=1.0)
    assert order[:2] == [2, 1]
    assert set(order) == {1, 2}


def test_times_are_learned_from_noise() -> None:
    draw, times = random.Random(1), StepTimes()
    for number in range(64):
        width, length = (0, 4)[number // 8 % 2], 100 + number
        seconds = (20 + width + length / 100) * math.exp(draw.gauss(0, 0.03)) * (3 if draw.random() < 0.1 else 1)
        times.add(width=width, num_rows=1, longest=length, seconds=seconds)
    found = times.of([0, 4], 1)
    assert found[4] / found[0] == pytest.approx(25 / 21, rel=0.05)
