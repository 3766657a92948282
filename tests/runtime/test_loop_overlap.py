"""What overlap is for, proved on a virtual clock: the device never waits for a host that is faster than a step."""

from __future__ import annotations

import pytest
from driven import Driven
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_device import VirtualDevice, continuation

from graphspec.runtime.loop import Policy

STEP = 1.0
many = settings(deadline=None, max_examples=60)


def ran(
    *, overlap: bool, rows: int, tokens: int, host_time: float, launch_time: float, accepted: bool = False
) -> Driven:
    """Rows of one prompt token each that come at once, and say `tokens` tokens."""
    device = VirtualDevice(
        num_slots=rows, prefill_time=STEP, step_time=STEP, launch_time=launch_time, right=lambda _: accepted
    )
    driven = Driven(device, Policy(overlap=overlap), host_time=host_time)
    for row in range(rows):
        driven.ask((row,), seed=row, max_new_tokens=tokens, ignore_eos=True)
    driven.run()
    for seed, asked in enumerate(driven.asked):
        assert list(asked.generation.token_ids) == continuation(asked.prompt, seed, tokens)
    return driven


@many
@given(
    rows=st.integers(1, 4),
    tokens=st.integers(2, 40),
    share=st.floats(0.0, 0.95),
    of_launches=st.floats(0.0, 1.0),
    accepted=st.booleans(),
)
def test_the_device_never_waits_for_a_host_that_needs_less_time_than_a_step(
    rows: int, tokens: int, share: float, of_launches: float, accepted: bool
) -> None:
    """The host's time of a turn: two launches at most, and a piece for each row."""
    launch_time = share * STEP * of_launches / 2
    host_time = share * STEP * (1 - of_launches) / rows
    driven = ran(
        overlap=True, rows=rows, tokens=tokens, host_time=host_time, launch_time=launch_time, accepted=accepted
    )
    assert max(driven.device.gaps, default=0.0) <= 1e-9
    spans = driven.device.spans
    assert spans[-1].end - spans[0].start == pytest.approx(len(spans) * STEP)


@many
@given(rows=st.integers(1, 4), tokens=st.integers(3, 20), share=st.floats(0.01, 3.0), of_launches=st.floats(0.0, 1.0))
def test_without_overlap_it_waits_for_all_that_the_host_does_between_two_steps(
    rows: int, tokens: int, share: float, of_launches: float
) -> None:
    launch_time, host_time = share * STEP * of_launches, share * STEP * (1 - of_launches) / rows
    driven = ran(overlap=False, rows=rows, tokens=tokens, host_time=host_time, launch_time=launch_time)
    before_steps = driven.device.gaps[2 * rows - 1 :]  # behind the last prompt, and the step of all but its row
    assert before_steps[rows:-rows] == pytest.approx([share * STEP] * len(before_steps[rows:-rows]))
    assert len(before_steps) >= tokens - 2


@many
@given(rows=st.integers(1, 4), share=st.floats(1.05, 3.0))
def test_with_overlap_a_slower_host_costs_only_what_it_needs_beyond_a_step(rows: int, share: float) -> None:
    driven = ran(overlap=True, rows=rows, tokens=30, host_time=share * STEP / rows, launch_time=0.0)
    steady = driven.device.gaps[3 * rows : -rows]
    assert len(steady) >= 10
    assert steady == pytest.approx([(share - 1) * STEP] * len(steady))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_alone_takes_the_time_of_its_steps_and_without_overlap_the_host_s_too(overlap: bool) -> None:
    driven = ran(overlap=overlap, rows=1, tokens=30, host_time=0.4, launch_time=0.1)
    host = 0.1 if overlap else 30 * (0.1 + 0.4) - 0.4
    assert driven.device.spans[-1].end == pytest.approx(30 * STEP + host)


def late_rows(driven: Driven) -> int:
    """Rows of launches whose results counted for nobody."""
    stepped = sum(len(span.slots) for span in driven.device.spans if span.kind == "step")
    prompts = sum(asked.row.chunks is not None and not asked.row.chunks for asked in driven.asked)
    return stepped + prompts - sum(len(batch.accepted) for batch in driven.batches)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("width", range(4))
@pytest.mark.parametrize("stop_at", range(1, 14))
def test_a_stop_that_is_seen_late_drops_exactly_the_late_row(stop_at: int, width: int, overlap: bool) -> None:
    """The other row in that step, and in all others, keeps everything."""
    prompts = ((a, b) for a in range(60) for b in range(60))
    prompt, tokens = next(
        (prompt, said) for prompt in prompts if len(set(said := continuation(prompt, 1, 14))) == len(said)
    )
    driven = Driven(VirtualDevice(num_slots=2, right=lambda position: position % 3 != 0), Policy(overlap=overlap))
    other = driven.ask((5, 6), seed=9, width=width, max_new_tokens=40, ignore_eos=True)
    stops = driven.ask(
        prompt, seed=1, width=width, ignore_eos=True, max_new_tokens=100, stop_token_ids=(tokens[stop_at - 1],)
    )
    driven.run()
    assert (list(stops.generation.token_ids), stops.generation.finish_reason) == (tokens[:stop_at], "stop")
    assert list(other.generation.token_ids) == continuation((5, 6), 9, 40)
    own = late_rows(driven) - late_by_length(width, overlap)
    # The prompt's token is known when its row has been in two steps.
    assert own == ((2 if stop_at == 1 else 1) if overlap else 0)


def late_by_length(width: int, overlap: bool) -> int:
    """Late rows of `other` alone: more tokens than one a step may fill its limit earlier than is certain."""
    driven = Driven(VirtualDevice(num_slots=2, right=lambda position: position % 3 != 0), Policy(overlap=overlap))
    driven.ask((5, 6), seed=9, width=width, max_new_tokens=40, ignore_eos=True)
    driven.run()
    return late_rows(driven)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("limit", range(1, 13))
def test_no_step_is_launched_too_many_or_too_few_near_the_limit(limit: int, overlap: bool) -> None:
    """One token a step: what will be there is certain, so no row is late (A14). All right: one step at most."""
    for right in (False, True):
        driven = Driven(VirtualDevice(right=lambda _, right=right: right), Policy(overlap=overlap))  # type: ignore[misc]
        asked = driven.ask(max_new_tokens=limit, ignore_eos=True)
        driven.run()
        assert len(asked.generation.token_ids) == limit
        steps = sum(span.kind == "step" for span in driven.device.spans)
        needed = -(-(limit - 1) // (4 if right else 1))
        assert needed <= steps <= needed + (overlap and right)
