"""What a request finds in the caches is what its prompt begins with, wherever it was and whatever was copied."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.runtime.prefixes import Prefixes, Taken

SLOTS, PLACES = 3, 4
LONG = tuple(range(100, 140))


@dataclass
class Memory:
    """Slots and places as an engine has them."""

    prefixes: Prefixes
    held: dict[int, list[int]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    def take(self, prompt: tuple[int, ...]) -> Taken:
        taken = self.prefixes.take(set(range(SLOTS)) - self.running, prompt)
        assert taken.slot not in self.running
        for copy in taken.copies:
            assert copy.target not in self.running
            assert copy.length or copy.source == copy.target
            assert copy.length <= len(self.held[copy.source])
            self.held[copy.target] = self.held[copy.source][: copy.length]
        assert self.held.get(taken.slot, [])[: taken.kept] == list(prompt[: taken.kept])
        assert taken.kept <= max(len(prompt) - 2, 0), "a token at least is run, and one for the drafter"
        self.held[taken.slot] = list(prompt)
        self.running.add(taken.slot)
        return taken

    def read_prompt(self, slot: int) -> None:
        self.prefixes.hold(slot, self.held[slot])

    def end(self, slot: int, answer: tuple[int, ...] = ()) -> None:
        self.held[slot] += answer
        self.prefixes.hold(slot, self.held[slot])
        self.running.remove(slot)

    def stored(self) -> int:
        """In the memory of the places, whatever is known of it."""
        return sum(len(tokens) for number, tokens in self.held.items() if number >= SLOTS)


def memory(*, places: int = PLACES, most: int = 200) -> Memory:
    return Memory(Prefixes(SLOTS, num_places=SLOTS + places, most_stored=most))


TOKENS = st.lists(st.integers(0, 2), max_size=60).map(tuple)
PROMPTS = st.one_of(
    TOKENS, st.tuples(st.sampled_from([LONG, LONG[:20], LONG[::-1]]), TOKENS).map(lambda x: x[0] + x[1])
)


@given(st.data(), st.sampled_from([0, 1, PLACES]), st.sampled_from([0, 30, 200]))
@settings(max_examples=100, deadline=None)
def test_every_request_finds_its_own_tokens(data: st.DataObject, places: int, most: int) -> None:
    now = memory(places=places, most=most)
    for _ in range(data.draw(st.integers(1, 25))):
        if now.running and (len(now.running) == SLOTS or data.draw(st.booleans())):
            slot = data.draw(st.sampled_from(sorted(now.running)))
            how = data.draw(st.sampled_from(["read", "end", "fail"]))
            if how == "read":
                now.read_prompt(slot)
            elif how == "end":
                now.end(slot, data.draw(TOKENS))
            else:
                now.prefixes.forget(slot)
                now.running.remove(slot)
                now.held[slot] = []
        else:
            now.take(data.draw(PROMPTS))
        assert now.stored() <= most


def test_a_prompt_that_another_row_is_running_is_copied_from_it() -> None:
    now = memory()
    first = now.take(LONG)
    assert now.take((*LONG, 1)).kept == 0, "not read yet"
    now.read_prompt(first.slot)
    third = now.take((*LONG, 2))
    assert (third.slot, third.kept) == (2, len(LONG) - 1)


def test_what_a_slot_held_before_others_took_it_comes_back() -> None:
    now = memory(places=8, most=400)
    slots = [now.take((*LONG[start:], start)).slot for start in range(SLOTS)]
    for slot in slots:
        now.end(slot)
    others = [now.take(tuple(range(start, start + 30))).slot for start in range(SLOTS)]
    for slot in others:
        now.end(slot)
    assert [now.take((*LONG[start:], start, 7)).kept for start in range(SLOTS)] == [
        len(LONG) - start for start in range(SLOTS)
    ]


def test_what_was_used_longest_ago_makes_room() -> None:
    now = memory(places=2)
    prompts = [tuple(range(start, start + 30)) for start in (0, 100, 200, 300)]
    for prompt in prompts:
        now.end(now.take(prompt).slot)
        now.running = {1, 2}
    now.running = set()
    found = [now.prefixes.take({0}, (*prompt, 9)).kept for prompt in prompts[::-1]]
    assert found == [29, 29, 29, 0]


@pytest.mark.parametrize("places", [0, -SLOTS])
def test_an_engine_without_places_keeps_what_is_in_its_slots(places: int) -> None:
    now = memory(places=places, most=0)
    now.end(now.take(LONG).slot)
    taken = now.take((*LONG, 5))
    assert (taken.kept, taken.copies) == (len(LONG) - 1, ())
    now.read_prompt(taken.slot)
    assert now.take(LONG).kept == (0 if places < 0 else len(LONG) - 2)


def test_what_is_held_elsewhere_is_not_saved_twice() -> None:
    now = memory()
    for slot in [now.take(LONG).slot, now.take(LONG).slot]:
        now.end(slot)
    assert now.prefixes.take({0}, (1, 2, 3)).copies == ()


def test_what_makes_room_lets_go_of_its_memory() -> None:
    """A long one takes one place of the many that short ones leave."""
    now = memory(places=3, most=60)
    for start in (0, 100, 200):
        now.end(now.take(tuple(range(start, start + 20))).slot)
        now.running = {1, 2}
    now.end(now.take(tuple(range(300, 360))).slot)
    assert now.stored() == 60
    now.take((1,))
    assert now.stored() == 60


def test_of_places_that_are_forgotten_nothing_is_found() -> None:
    now = memory()
    for prompt in (LONG, LONG[::-1]):
        now.end(now.take(prompt).slot)
        now.running = {1, 2}
    assert now.stored() == len(LONG)
    (emptied,) = now.prefixes.forget_stored()
    assert (emptied.target, emptied.length) == (emptied.source, 0)
    now.running = set()
    assert now.take(LONG).kept == 0
    assert now.take(LONG[::-1]).kept in (0, len(LONG) - 2)
