"""Rules that hold whatever comes when, I1 to I10 of reference/serving.md §2.6, on a virtual device.

I9, of grammars, is missing: there are none yet. The device's own assertions belong to all of them: no row is stepped
before its prompt, no token is below 0, nothing is written beyond the end of a cache.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from driven import Driven
from forced import passes_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import MAX_LENGTH, SCENARIOS, VISITS, Scenario, Visit, outcome, play, right, untroubled
from virtual_device import VirtualDevice, continuation

from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.loop import Policy
from graphspec.runtime.refusals import DeadlineError

many = settings(deadline=None, max_examples=100)
POLICIES = [
    Policy(overlap=overlap, prompts_first=first, reuse_prefixes=reuse, most_stored=60)
    for overlap in (True, False)
    for first in (True, False)
    for reuse in (True, False)
]


@many
@given(scenario=SCENARIOS)
def test_i1_the_answers_are_the_same_with_overlap_and_without_it(scenario: Scenario) -> None:
    """And whatever else the policy says: those of each request alone."""
    for policy in POLICIES:
        played = play(replace(untroubled(scenario), policy=policy))
        assert all(right(asked) for asked in played.asked)
        assert not any(asked.error for asked in played.asked)


@many
@given(scenario=SCENARIOS)
def test_i2_no_answer_is_longer_than_asked_for_and_what_is_counted_was_told(scenario: Scenario) -> None:
    def watch(driven: Driven) -> None:
        for asked in driven.asked:
            told = sum(len(piece.token_ids) for piece in asked.pieces)
            assert told <= asked.row.answer.limit
            if asked.ended and not asked.error:
                assert told == len(asked.generation.token_ids)

    played = play(scenario, watch)
    ended = [asked.generation for asked in played.asked if asked.ended and not asked.error]
    assert len(played.answers) == len(ended)
    if not any(asked.cancelled or asked.error for asked in played.asked):
        assert sum(batch.committed for batch in played.batches) == sum(len(one.token_ids) for one in ended)


@many
@given(scenario=SCENARIOS)
def test_i3_a_late_result_of_a_request_that_ended_or_was_cancelled_changes_nothing(scenario: Scenario) -> None:
    """`Asked` asserts that nothing is told after the end; here, that what was told is right and the others' too."""
    played = play(scenario)
    assert all(right(asked) for asked in played.asked)
    for asked in played.asked:
        assert asked.ended or asked.cancelled


@pytest.mark.parametrize("cancelled", range(14))
@pytest.mark.parametrize("overlap", [True, False])
def test_i3_at_every_turn_in_which_it_may_be_cancelled(cancelled: int, overlap: bool) -> None:
    visit = Visit(prompt=(1, 2, 3, 4, 5), arrives=0, width=3, seed=1, chunk_size=2, max_new_tokens=30, ignore_eos=True)
    others = [replace(visit, prompt=(7, 7), seed=2, arrives=1), replace(visit, seed=3, arrives=2)]
    visits = (replace(visit, cancelled=cancelled), *others)
    played = play(Scenario(visits=visits, policy=Policy(overlap=overlap)))
    assert all(right(asked) for asked in played.asked)
    assert played.asked[0].cancelled != played.asked[0].ended
    assert all(outcome(asked)[1] == "length" for asked in played.asked[1:])


@many
@given(visits=st.lists(VISITS, min_size=2, max_size=6).map(tuple), cut=st.integers(0, 30))
def test_i4_a_slot_that_is_given_away_while_a_step_of_it_is_in_flight_holds_the_new_request_s_rows(
    visits: tuple[Visit, ...], cut: int
) -> None:
    """One slot, slow steps: whoever comes next is admitted behind the late step. The model's tokens depend on
    everything in the cache, so a position written by the wrong request gives another answer."""
    first, *rest = (replace(visit, arrives=0, cancelled=None, patience=None) for visit in visits)
    scenario = Scenario(visits=(replace(first, cancelled=cut), *rest), num_slots=1, step_time=5.0)
    assert all(right(asked) for asked in play(scenario).asked)


def test_i4_such_a_slot_is_given_away_in_these_tests() -> None:
    driven = Driven(VirtualDevice(num_slots=1, step_time=5.0))
    first = driven.ask(max_new_tokens=30, ignore_eos=True)
    second = driven.ask((4, 5), max_new_tokens=5, ignore_eos=True)
    driven.run(4)
    driven.cancel(first)
    driven.loop.admit()
    assert second.row.slot == first.row.slot
    assert driven.device.spans[-1].kind == "step"
    assert driven.device.spans[-1].end > driven.clock.now
    driven.run()
    assert list(second.generation.token_ids) == continuation((4, 5), 0, 5)


@many
@given(scenario=SCENARIOS)
def test_i5_the_host_s_bounds_hold_the_device_s_length_and_meet_it_when_nothing_is_in_flight(
    scenario: Scenario,
) -> None:
    def watch(driven: Driven) -> None:
        for asked in driven.asked:
            row = asked.row
            if row.done or row.cancelled or row.chunks is None:
                continue
            known = len(row.answer.prompt) - sum(len(chunk.tokens) for chunk in row.chunks)
            if row.answer.token_ids or row.in_flight:
                known += len(row.answer.token_ids) - 1  # the newest token is not in the cache yet
            written = driven.device.written(row.slot)
            assert known + row.in_flight <= written <= known + row.in_flight * (driven.device.num_drafts + 1)

    play(scenario, watch)


@many
@given(scenario=SCENARIOS)
def test_i6_no_token_below_0_is_ever_run(scenario: Scenario) -> None:
    """The device asserts it of every chunk and step; `play` that none of its assertions failed."""
    played = play(scenario)
    assert not played.failures
    tokens = [token for asked in played.asked for piece in asked.pieces for token in piece.token_ids]
    assert all(token >= 0 for token in tokens)


def by_hand(scenario: Scenario, visit: Visit, tokens: list[int]) -> AcceptanceStatistics:
    counts, start = AcceptanceStatistics(), len(visit.prompt)
    if visit.width:
        drafts = [token if (start + at) % scenario.wrong != 0 else (token + 1) % 64 for at, token in enumerate(tokens)]
        for accepted, kept in passes_by_hand(drafts, tokens, visit.width):
            counts.add(accepted, visit.width, committed=kept)
    return counts


@many
@given(scenario=SCENARIOS)
def test_i7_drafts_are_counted_once_and_only_those_that_became_output(scenario: Scenario) -> None:
    scenario = untroubled(scenario)
    played = play(scenario)
    answers = [asked.generation for asked in played.asked]
    for visit, answer in zip(scenario.visits, answers, strict=True):
        assert answer.acceptance == by_hand(scenario, visit, list(answer.token_ids))
    verified = [batch for batch in played.batches if batch.width]
    assert sum(sum(batch.accepted) for batch in verified) == sum(one.acceptance.accepted for one in answers)
    assert sum(len(batch.accepted) for batch in verified) == sum(one.acceptance.verifications for one in answers)
    stepped = [span.width for span in played.device.spans if span.kind == "step"]
    assert [batch.width for batch in played.batches if batch.is_step] == stepped


@many
@given(widths=st.lists(st.integers(0, 3), min_size=2, max_size=6), wrong=st.integers(2, 6), overlap=st.booleans())
def test_i8_requests_of_other_widths_in_the_same_slot_never_verify_each_other_s_drafts(
    widths: list[int], wrong: int, overlap: bool
) -> None:
    """Each one's first drafts come from its own prompt, though the slot's cache is kept: all right ones are accepted.
    (Other widths for one row between steps: tests/runtime/test_engine_protocol.py, on real engines.)"""
    visit = Visit(prompt=(1, 2, 3, 4), arrives=0, width=0, seed=0, chunk_size=2, max_new_tokens=20, ignore_eos=True)
    visits = tuple(replace(visit, width=width, seed=seed) for seed, width in enumerate(widths))
    scenario = Scenario(visits=visits, num_slots=1, wrong=wrong, policy=Policy(overlap=overlap))
    for one, asked in zip(visits, play(scenario).asked, strict=True):
        assert asked.generation.acceptance == by_hand(scenario, one, outcome(asked)[0])


@many
@given(scenario=SCENARIOS)
def test_i10_every_slot_is_free_in_the_end_also_of_those_without_output(scenario: Scenario) -> None:
    played = play(scenario)
    loop = played.loop
    assert (loop.num_running, loop.num_waiting, loop.cache_usage) == (0, 0, 0.0)
    assert loop._free == set(range(scenario.num_slots))
    assert not loop._dated


@pytest.mark.parametrize("overlap", [True, False])
def test_i10_a_request_without_output_gives_back_its_slot_within_a_turn(overlap: bool) -> None:
    """Nothing asked for, cancelled before its first token, too late for it, or failed."""
    device = VirtualDevice(num_slots=1, fails=lambda number: number == 0)
    driven = Driven(device, Policy(overlap=overlap), max_length=MAX_LENGTH)
    failed = driven.ask(max_new_tokens=5)
    driven.run(3)
    assert driven.loop._free == {0}
    nothing = driven.ask(max_new_tokens=0)
    driven.run(1)
    assert driven.loop._free == {0}
    cancelled = driven.ask(chunk_size=1, max_new_tokens=5)
    driven.run(1)
    driven.cancel(cancelled)
    late = driven.ask(tuple(range(30)), chunk_size=1, deadline=driven.clock.now + 4, max_new_tokens=5)
    driven.run(20)
    after = driven.ask(max_new_tokens=5, ignore_eos=True)
    driven.run()
    assert failed.error is not None
    assert nothing.generation.token_ids == ()
    assert not cancelled.ended
    assert isinstance(late.error, DeadlineError)
    assert outcome(after) == (continuation(after.prompt, 0, 5), "length")
    assert driven.loop._free == {0}
