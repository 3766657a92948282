"""Rows' states keep what was written to them, wherever they are moved to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from graphspec.errors import EngineError
from graphspec.manifest import StateSpec
from graphspec.runtime import caches
from graphspec.runtime.caches import Bound, PackedCaches, Placed

CAPACITY, SLOTS, AHEAD = 400, 5, 9
STATES = (
    StateSpec(input="target.0.keys", output="a", dtype="float32", shape=("batch", 2, "capacity", 3)),
    StateSpec(input="draft.history", output="b", dtype="int64", shape=("batch", "capacity")),
)


@dataclass(frozen=True)
class Sizes:
    """Of a manifest, what the caches read."""

    capacity: int = CAPACITY
    states: tuple[StateSpec, ...] = STATES


def memory(bound: Bound) -> NDArray[Any]:
    """What the backend would see."""
    size = int(np.prod(bound.shape)) * np.dtype(bound.dtype).itemsize
    raw = (ctypes.c_char * size).from_address(bound.address)
    return np.frombuffer(raw, bound.dtype).reshape(bound.shape)


def rows(placed: Placed, row: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
    keys, history = (memory(bound) for bound in placed.states())
    return keys[row, :, :end], history[row, :end]


class Rows:
    """Steps as an engine makes them: whatever runs writes, and only what takes part grows."""

    def __init__(self) -> None:
        self.caches = PackedCaches(Sizes(), SLOTS)  # type: ignore[arg-type]
        self.held = np.zeros(SLOTS, np.int64)
        self.written: list[list[int]] = [[] for _ in range(SLOTS)]
        self.places: dict[int, list[int]] = {}
        self.counter = 0

    def admit(self, slot: int, kept: int) -> None:
        self.held[slot] = kept
        del self.written[slot][kept:]

    def copy(self, source: int, target: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.all[source])))
        self.caches.copy(source, target, length)
        content = self.all[source][:length]
        if target < SLOTS:
            self.written[target], self.held[target] = content, length
        else:
            self.places[target] = content

    @property
    def all(self) -> dict[int, list[int]]:
        return dict(enumerate(self.written)) | self.places

    def launch(self, slots: tuple[int, ...], count: int, *, alone: bool = False) -> Placed:
        placed = self.caches.place(slots, self.held, AHEAD, alone=alone)
        assert placed.visible <= CAPACITY
        assert {bound.shape[axis] for bound, axis in zip(placed.states(), (2, 1), strict=True)} == {placed.visible}
        for row, slot in enumerate(placed.slots):
            length = int(placed.lengths[row])
            if slot in slots:
                assert length == self.held[slot]
                self.check(placed, row, slot)
            assert length + count <= placed.visible
            self.counter += 1
            keys, history = rows(placed, row, length + count)
            keys[:, length:] = self.counter
            history[length:] = self.counter
            if slot in slots:
                self.written[slot] += [self.counter] * count
                self.held[slot] += count
        return placed

    def check(self, placed: Placed, row: int, slot: int) -> None:
        keys, history = rows(placed, row, int(self.held[slot]))
        assert history.tolist() == self.written[slot]
        np.testing.assert_array_equal(keys, np.broadcast_to(np.array(self.written[slot])[:, None], keys.shape))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_row_finds_what_it_wrote_whatever_ran_between(data: st.DataObject) -> None:
    held = Rows()
    for _ in range(data.draw(st.integers(1, 40))):
        room = [slot for slot in range(SLOTS) if held.held[slot] + AHEAD <= CAPACITY]
        move = data.draw(st.sampled_from(["admit", "prompt", "step", "steps", "copy"]))
        if move == "copy":
            held.copy(data.draw(st.sampled_from(sorted(held.all))), data.draw(st.integers(0, SLOTS + 1)), data)
        elif move == "admit" or not room:
            slot = data.draw(st.integers(0, SLOTS - 1))
            held.admit(slot, data.draw(st.integers(0, int(held.held[slot]))))
        elif move == "prompt":
            held.launch((data.draw(st.sampled_from(room)),), data.draw(st.integers(1, AHEAD)), alone=True)
        else:
            slots = tuple(sorted(data.draw(st.sets(st.sampled_from(room), min_size=1))))
            for _ in range(1 if move == "step" else 20):
                if all(held.held[slot] + AHEAD <= CAPACITY for slot in slots):
                    held.launch(slots, data.draw(st.integers(1, AHEAD)))


def test_memory_grows_with_what_is_held_and_is_not_moved_every_step() -> None:
    held = Rows()
    places = [held.launch((0, 1), 1) for _ in range(CAPACITY - AHEAD)]
    assert places[0].visible == 32
    assert places[-1].visible == CAPACITY
    assert len({placed.memory for placed in places}) == 13


def test_a_row_by_itself_is_prompted_and_stepped_in_one_place() -> None:
    held = Rows()
    prompt = held.launch((3,), AHEAD, alone=True)
    assert held.launch((3,), 1).memory == prompt.memory
    assert prompt.slots == range(3, 4)


def test_a_long_row_that_idles_does_not_lengthen_the_others() -> None:
    held = Rows()
    for _ in range(30):
        held.launch((0, 1), AHEAD)
    held.admit(1, 4)
    for _ in range(20):
        short = held.launch((1, 2), 1)
    assert short.visible == 32
    assert held.launch((0, 1), 1).visible >= 270, "and is found where it was set aside"


@pytest.mark.parametrize("kept", [0, 5])
def test_what_is_kept_of_a_row_set_aside_is_all_that_comes_back(kept: int) -> None:
    held = Rows()
    for _ in range(10):
        held.launch((0,), AHEAD, alone=True)
    held.launch((1,), 1, alone=True)
    held.admit(0, kept)
    assert held.launch((0,), 1, alone=True).visible == 32


def test_of_a_copy_that_fails_nothing_is_left_that_could_be_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Rows()
    held.launch((0,), AHEAD, alone=True)
    held.launch((1,), AHEAD, alone=True)

    def no_memory(*_: object) -> list[Any]:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(held.caches, "_held_by", no_memory)
        with pytest.raises(MemoryError):
            held.caches.copy(0, 1, 5)
    held.admit(1, 5)
    with pytest.raises(EngineError, match="row 1 should hold 5 tokens and holds none"):
        held.launch((1,), 1, alone=True)
    held.admit(1, 0)
    held.launch((1,), 1, alone=True)
    held.launch((0, 1), 1)


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("at", range(len(STATES)))
def test_where_memory_runs_out_as_rows_move_they_are_whole_when_there_is_some(
    grows: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Rows()
    for _ in range(3):
        held.launch((0, 1), AHEAD)
    if not grows:
        for _ in range(15):
            held.launch((0,), AHEAD)
        held.admit(0, 3)
    allocated, real = 0, caches.zeros

    def zeros(*arguments: Any) -> NDArray[Any]:
        nonlocal allocated
        allocated += 1
        if allocated == at + 1:
            raise MemoryError
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(caches, "zeros", zeros)
        with pytest.raises(MemoryError):
            held.launch((0, 1), AHEAD if grows else 1)
    held.launch((1,), 1)
    held.launch((0, 1), 1)
