"""The loop on a virtual clock: who is served when, and how long everybody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from driven import Asked, Driven, expected
from numpy.typing import NDArray
from virtual_device import VirtualDevice, VirtualPending, continuation

from graphspec.errors import EngineError
from graphspec.runtime.engine import Chunk
from graphspec.runtime.loop import Policy
from graphspec.runtime.prefixes import Taken
from graphspec.runtime.refusals import DeadlineError
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.stops import Cut

LONG = tuple(range(60)) * 3


def answered(asked: Asked, *, max_length: int = 200) -> bool:
    found = asked.generation
    return (list(found.token_ids), found.finish_reason) == expected(asked, room=max_length - len(asked.prompt))


def longest_gap(asked: Asked) -> float:
    return max(after - before for before, after in pairwise(asked.times))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_a_long_prompt_delays_no_step_of_the_others_by_more_than_one_chunk(overlap: bool, chunk_size: int) -> None:
    driven = Driven(VirtualDevice(prefill_time=5.0, step_time=1.0), Policy(overlap=overlap), host_time=0.01)
    steady = [driven.ask((i,), seed=i, max_new_tokens=150, ignore_eos=True) for i in range(3)]
    driven.run(6)
    late = driven.ask(LONG, chunk_size=chunk_size, max_new_tokens=4, ignore_eos=True)
    driven.run()
    assert all(answered(asked) for asked in (*steady, late))
    host = 4 * driven.host_time
    assert all(longest_gap(asked) <= 5.0 + 1.0 + host + 1e-9 for asked in steady)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_delay_no_chunk_by_more_than_one_step(overlap: bool) -> None:
    driven = Driven(VirtualDevice(prefill_time=1.0, step_time=3.0), Policy(overlap=overlap))
    for i in range(3):
        driven.ask((i,), seed=i, max_new_tokens=150, ignore_eos=True)
    driven.run(6)
    asked_at = driven.clock.now
    late = driven.ask(LONG, chunk_size=10, max_new_tokens=4, ignore_eos=True)
    driven.run()
    chunks = [span for span in driven.device.spans if span.kind == "prefill"][-18:]
    assert all(after.start - before.end <= 3.0 for before, after in pairwise(chunks))
    # The step that ran, the one that was launched behind it, then a chunk and a step in turn, and the last to be read.
    assert late.times[0] - asked_at <= 2 * 3.0 + 18 * (1.0 + 3.0)


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_goes_on() -> None:
    driven = Driven(VirtualDevice(num_slots=2, prefill_time=1.0, step_time=0.1))
    long = driven.ask(LONG, chunk_size=1, max_new_tokens=2)
    driven.run(3)
    shorts = []
    for i in range(30):
        shorts.append(driven.ask((i, 5), chunk_size=1, seed=i, max_new_tokens=1))
        asked_at = driven.clock.now
        while not shorts[-1].ended:
            driven.turn()
        assert shorts[-1].times[0] - asked_at <= 6 * 1.1  # its two chunks, two of the long one, and the overlap
    done = sum(span.kind == "prefill" for span in driven.device.spans) - 2 * len(shorts)
    assert done >= 2 * len(shorts)
    driven.run()
    assert all(answered(asked) for asked in (long, *shorts))


def test_a_client_with_many_requests_takes_no_more_than_its_part_of_the_rows() -> None:
    driven = Driven(VirtualDevice(num_slots=4))
    many = [driven.ask((i,), seed=i, client="batch", max_new_tokens=12, ignore_eos=True) for i in range(60)]
    driven.run(5)
    assert all(asked.row.slot >= 0 for asked in many[:4])
    others = [driven.ask((50 + i,), seed=i, max_new_tokens=12, ignore_eos=True) for i in range(3)]
    while not all(asked.row.slot >= 0 for asked in others):
        driven.turn()
    # They got the first rows that became free, and the batch has what is left.
    assert sum(asked.row.slot >= 0 for asked in many) <= 4 + 1
    driven.run()
    assert all(answered(asked) for asked in (*many, *others))


def test_a_client_with_many_requests_is_served_beside_a_stream_of_others() -> None:
    driven = Driven(VirtualDevice(num_slots=2))
    many = [driven.ask((i,), seed=i, client="batch", max_new_tokens=6, ignore_eos=True) for i in range(10)]
    for i in range(400):
        if driven.loop.num_waiting < 15:
            driven.ask((i % 60,), seed=i, max_new_tokens=6, ignore_eos=True)
        driven.turn()
        if all(asked.ended for asked in many):
            break
    assert all(answered(asked) for asked in many)


def test_equal_clients_are_served_in_the_order_they_came() -> None:
    driven = Driven(VirtualDevice(num_slots=1))
    asked = []
    for i in range(6):
        asked.append(driven.ask((i,), seed=i, max_new_tokens=3, ignore_eos=True))
        driven.clock.now += 0.1
    driven.run()
    ends = [one.times[-1] for one in asked]
    assert ends == sorted(ends)


@pytest.mark.parametrize("overlap", [True, False])
def test_at_its_deadline_an_answer_ends_with_what_there_is_of_it(overlap: bool) -> None:
    driven = Driven(VirtualDevice(num_slots=1, right=lambda _: False), Policy(overlap=overlap))
    late = driven.ask(deadline=10.0, max_new_tokens=100, ignore_eos=True)
    after = driven.ask((7,), max_new_tokens=3, ignore_eos=True)
    driven.run()
    tokens = list(late.generation.token_ids)
    assert 7 <= len(tokens) <= 10
    assert tokens == continuation(late.prompt, 0, len(tokens))
    assert (late.generation.finish_reason, late.generation.stop_reason) == ("length", "timeout")
    assert late.times[-1] <= 10.0 + 2.0  # within a turn
    assert answered(after)


def test_text_that_a_stop_string_held_back_comes_out_at_the_deadline() -> None:
    driven = Driven(VirtualDevice(num_slots=1, right=lambda _: False))
    free = driven.ask(max_new_tokens=20, ignore_eos=True)
    driven.run()
    text = free.generation.text
    held = driven.ask(deadline=driven.clock.now + 6.5, max_new_tokens=100, ignore_eos=True, stop=(text[:15] + "~",))
    driven.run()
    assert len(held.pieces) == 1
    assert held.generation.text == text[: len(held.generation.token_ids)] != ""


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_that_has_not_begun_by_its_deadline_is_an_error(waits: bool) -> None:
    """Whether it waits for a row, or has one and its prompt is still read."""
    driven = Driven(VirtualDevice(num_slots=1 if waits else 2))
    first = driven.ask(max_new_tokens=30, ignore_eos=True)
    late = driven.ask(LONG, chunk_size=2, deadline=8.0, max_new_tokens=5)
    driven.run()
    assert isinstance(late.error, DeadlineError)
    assert not late.pieces
    assert answered(first)
    assert (driven.loop.num_running, driven.loop.num_waiting, driven.loop.cache_usage) == (0, 0, 0.0)


def test_a_deadline_that_is_kept_changes_nothing() -> None:
    driven = Driven()
    asked = driven.ask(deadline=1000.0, max_new_tokens=30)
    driven.run()
    assert answered(asked)
    assert not driven.loop._dated


def test_how_a_request_went_is_reported_when_it_is_answered() -> None:
    driven = Driven(VirtualDevice(num_slots=1, prefill_time=2.0, step_time=1.0, right=lambda _: False))
    driven.ask((1, 2, 3, 4), chunk_size=2, max_new_tokens=4, ignore_eos=True)
    driven.ask((1, 2, 3, 4), chunk_size=2, max_new_tokens=1, ignore_eos=True)
    driven.cancel(driven.ask())
    driven.run()
    first, second = driven.answers
    assert (first.queue_time, first.prefill_time, first.decode_time) == (0.0, 4.0, 3.0)
    assert (first.num_prompt_tokens, first.num_cached_tokens, second.num_cached_tokens) == (4, 0, 2)
    assert (second.queue_time, second.prefill_time, second.decode_time) == (7.0, 2.0, 0.0)


def test_the_cache_s_use_is_that_of_the_rows_that_run() -> None:
    driven = Driven(VirtualDevice(num_slots=2, capacity=100, right=lambda _: False))
    driven.ask(tuple(range(40)), chunk_size=10, max_new_tokens=3, ignore_eos=True)
    seen = []
    while not driven.loop.idle:
        driven.turn()
        seen.append(driven.loop.cache_usage)
    assert seen[:5] == [10 / 200, 20 / 200, 30 / 200, 40 / 200, 42 / 200]  # then the prompt's token and a step's
    assert seen[-1] == 0.0


def test_when_to_come_again_is_told_by_how_fast_answers_come_and_forgotten_after_a_pause() -> None:
    driven = Driven(VirtualDevice(num_slots=1, prefill_time=1.0, step_time=1.0, right=lambda _: False))
    for i in range(9):
        driven.ask((i,), max_new_tokens=3, ignore_eos=True)
    assert driven.loop.retry_after == 1.0  # nothing is known yet
    while sum(asked.ended for asked in driven.asked) < 4:
        driven.turn()
    late = driven.ask((9,), deadline=driven.clock.now)
    driven.turn()
    assert isinstance(late.error, DeadlineError)
    assert late.error.retry_after == pytest.approx(driven.loop.num_waiting * 3.0) == 12.0
    driven.run()
    driven.clock.now += 1000
    for i in range(9):
        driven.ask((i,), max_new_tokens=3)
    assert driven.loop.retry_after == 1.0


@pytest.mark.parametrize("waiting", [5, 500])
def test_nobody_is_told_to_stay_away_for_longer_than_a_minute(waiting: int) -> None:
    driven = Driven(VirtualDevice(num_slots=1, step_time=10.0, right=lambda _: False))
    for i in range(waiting + 3):
        driven.ask((i % 60,), max_new_tokens=2, ignore_eos=True)
    while sum(asked.ended for asked in driven.asked) < 3:
        driven.turn()
    assert driven.loop.retry_after == pytest.approx(min(driven.loop.num_waiting * 11.0, 60.0))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shorter", range(4))
def test_a_conversation_goes_on_from_the_cache_and_says_what_it_says_from_a_cold_start(
    overlap: bool, shorter: int
) -> None:
    """Wherever the answer before ended, inside a block or at its end, and were it cut back."""
    for stop_at in range(2, 9):
        driven = Driven(VirtualDevice(num_slots=2), Policy(overlap=overlap))
        prompt = (1, 2, 3, 4, 5, 6)
        stops = continuation(prompt, 0, 20)[stop_at - 1]
        first = driven.ask(prompt, max_new_tokens=20, ignore_eos=True, stop_token_ids=(stops,))
        driven.run()
        turn = (*prompt, *first.generation.token_ids)
        turn = (*turn[: len(turn) - shorter], 50, 51, 52)
        second = driven.ask(turn, seed=4, max_new_tokens=20, ignore_eos=True)
        driven.run()
        assert answered(second)
        # The newest token was not run, and the drafter's cache at the last position knew another token after it.
        assert second.generation.num_cached_tokens == len(turn) - 3 - max(1 - shorter, 0) - 1


@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_that_cannot_be_written_down_fails_alone(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever in its text or its stop strings it is: the rows beside it in the step go on."""
    driven = Driven(policy=Policy(overlap=overlap))
    fine, broken, also_fine = (driven.ask((i,), seed=i, max_new_tokens=30, ignore_eos=True) for i in range(3))
    tracker = broken.row.answer.tracker
    push = tracker.push

    def failing(token_ids: Sequence[int]) -> Cut | None:
        if tracker.num_tokens > 8:
            raise ValueError("no such text")
        return push(token_ids)

    monkeypatch.setattr(tracker, "push", failing)
    driven.run()
    assert answered(fine)
    assert answered(also_fine)
    assert isinstance(broken.error, EngineError)
    assert len(driven.failures) == 1
    assert driven.loop._free == {0, 1, 2, 3}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_finds_no_place_fails_alone(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(policy=Policy(overlap=overlap))
    prefixes = driven.loop._prefixes
    take = prefixes.take

    def failing(free: set[int], prompt: Sequence[int]) -> Taken:
        if prompt == (1,):
            raise MemoryError("none left")
        return take(free, prompt)

    monkeypatch.setattr(prefixes, "take", failing)
    fine, broken, also_fine = (driven.ask((i,), seed=i, max_new_tokens=30, ignore_eos=True) for i in range(3))
    driven.run()
    assert answered(fine)
    assert answered(also_fine)
    assert isinstance(broken.error, EngineError)
    assert driven.loop._free == {0, 1, 2, 3}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_after_a_copy_that_fails_answers_are_those_of_a_cold_start(overlap: bool, at_once: bool) -> None:
    """At once: the turn is interrupted, and all requests; later: the request that counted on it fails by itself."""
    device = FailingCopies(at_once=at_once, num_slots=2)
    driven = Driven(device, Policy(overlap=overlap, most_stored=1000))
    conversations = [tuple(range(start, start + 30)) for start in (1, 9, 17)]
    for prompt in conversations:
        driven.ask(prompt, max_new_tokens=3)
        driven.run()
    device.failing = True
    failed = driven.ask((*conversations[0], 60), max_new_tokens=3)
    if at_once:
        with pytest.raises(RuntimeError, match="no memory"):
            driven.run()
    driven.run()
    assert isinstance(failed.error, EngineError)
    device.failing = False
    for first in (60, 61, 0, 60):
        for prompt in conversations:
            asked = driven.ask((first, *prompt), max_new_tokens=3)
            driven.run()
            assert answered(asked)
    asked = driven.ask((60, *conversations[0]), max_new_tokens=3)
    driven.run()
    assert answered(asked)
    assert asked.generation.num_cached_tokens >= 29, "copies are made again"


@dataclass
class FailingCopies(VirtualDevice):
    """Copies fail when they are asked for, or when what they should have left is run."""

    at_once: bool = False
    failing: bool = False
    broken: set[int] = field(default_factory=set)

    def copy(self, source: int, target: int, length: int) -> None:
        if not self.failing:
            self.broken.discard(target)
            super().copy(source, target, length)
        elif self.at_once:
            raise RuntimeError("no memory")
        else:
            self.broken.add(target)

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        if not kept:
            self.broken.discard(slot)
        super().admit(slot, params, uniform, kept=0 if slot in self.broken else kept)

    def prefill(self, chunk: Chunk) -> VirtualPending:
        if chunk.slot in self.broken:
            raise EngineError("the row holds none")
        return super().prefill(chunk)
