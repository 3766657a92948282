"""Where the rows' states lie on a CPU: packed to the length in use, so that a step reads whole tensors.

ONNX Runtime has no views: the first L of S positions of a cache are a copy, in every layer of every step. So a step
is given tensors of exactly L positions, and rows are moved when L changes, which is seldom.

    one row being prompted or stepped by itself ─▶ a table of one row
    several rows stepped together               ─▶ the table of all slots; rows idle and longer than these are set aside
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from graphspec.errors import EngineError
from graphspec.manifest import Manifest, StateSpec

Array = NDArray[Any]

_SHORTEST = 32
"""Positions are rounded up to a multiple of this, or of an eighth: fewer moves and shapes, equal bits."""
_IDLE = 16
"""Launches after which a row that took no part in them is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A state of some rows, as the backend is told of it."""

    input: str
    output: str
    dtype: Any
    shape: tuple[int, ...]
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a launch finds its rows."""

    slots: range
    """Of every row that is computed, in order; some may take no part."""
    lengths: NDArray[np.int64]
    """i64[rows]: positions that each of them holds."""
    visible: int
    """L: positions that are looked at."""
    memory: tuple[str, int]
    """Which memory, and how often it has moved: what was bound to an earlier one is stale."""
    states: Callable[[], tuple[Bound, ...]]


class Caches(Protocol):
    """The states of all slots."""

    def place(self, slots: Sequence[int], held: NDArray[np.int64], ahead: int, *, alone: bool) -> Placed:
        """Makes room for `ahead` positions after those that each row holds, i64[slots]; `alone`: a prompt's row."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a row become all that the target holds: another row, or a place aside. If
        that raises, it holds nothing."""
        ...


class PackedCaches:
    """Caches in the memory of a CPU. A row's content lies in one place: together, alone or aside."""

    def __init__(self, manifest: Manifest, num_slots: int) -> None:
        self._capacity, self._states = manifest.capacity, manifest.states
        self._together = _Table("together", manifest.states, num_slots)
        self._alone = _Table("alone", manifest.states, 1)
        self._alone_slot: int | None = None
        self._resident: dict[int, int] = {}
        """Slots whose content lies in `_together`, with the launch that they were last in."""
        self._aside: dict[int, list[Array]] = {}
        self._launches = 0

    def place(self, slots: Sequence[int], held: NDArray[np.int64], ahead: int, *, alone: bool) -> Placed:
        self._launches += 1
        if alone or tuple(slots) == (self._alone_slot,):
            self._fit_alone(slots[0], held, ahead)
            return self._alone.placed(range(slots[0], slots[0] + 1), held[list(slots)], first=0)
        self._fit_together(slots, held, ahead)
        computed = range(min(slots), max(slots) + 1)
        lengths = lengths_of(computed, slots, held, self._capacity - ahead)
        lengths[[slot not in self._resident for slot in computed]] = 0
        return self._together.placed(computed, lengths, first=computed.start)

    def copy(self, source: int, target: int, length: int) -> None:
        try:
            content = [values.copy() for values in self._held_by(source, length)] if length else []
        finally:  # what it held before would be taken for what it should hold now
            self._leave(target)
        if content:
            self._aside[target] = content

    def _fit_alone(self, slot: int, held: NDArray[np.int64], ahead: int) -> None:
        length = self._rounded(int(held[slot]) + ahead)
        if self._alone_slot == slot:
            self._alone.fit(length)
            return
        if self._alone_slot is not None:
            self._set_aside(self._alone_slot, held)
        content = self._taken(slot, held)
        self._alone_slot = slot
        self._alone.fit(length, keep=False)
        self._alone.write(0, content)

    def _fit_together(self, slots: Sequence[int], held: NDArray[np.int64], ahead: int) -> None:
        wanted = self._rounded(max(int(held[slot]) for slot in slots) + ahead)
        for slot, newest in list(self._resident.items()):
            if self._launches - newest > _IDLE and int(held[slot]) + ahead > wanted:
                self._set_aside(slot, held)
        longest = max(int(held[slot]) for slot in {*self._resident, *slots}) + ahead
        self._together.fit(self._rounded(longest))
        for slot in slots:
            if slot not in self._resident:
                self._together.write(slot, self._taken(slot, held))
            self._resident[slot] = self._launches

    def _rounded(self, length: int) -> int:
        step = max(_SHORTEST, (1 << length.bit_length()) // 16)
        return min(-(-length // step) * step, self._capacity)

    def _set_aside(self, slot: int, held: NDArray[np.int64]) -> None:
        self._aside[slot] = self._taken(slot, held)

    def _taken(self, slot: int, held: NDArray[np.int64]) -> list[Array]:
        """What the row holds, from wherever it lies; it lies nowhere then."""
        content = self._held_by(slot, int(held[slot]))
        self._leave(slot)
        return content

    def _leave(self, slot: int) -> None:
        self._aside.pop(slot, None)
        self._resident.pop(slot, None)
        if slot == self._alone_slot:
            self._alone_slot = None

    def _held_by(self, number: int, count: int) -> list[Array]:
        """The first positions of a row or place. Raises EngineError if it holds none."""
        if number in self._aside:
            aside = zip(self._aside[number], self._states, strict=True)
            return [_first(values, state, count) for values, state in aside]
        if number == self._alone_slot:
            return self._alone.read(0, count)
        if number in self._resident:
            return self._together.read(number, count)
        if count:
            raise EngineError(f"row {number} should hold {count} tokens and holds none; restart the server")
        return []


class _Table:
    """Every state of some rows, of one length."""

    def __init__(self, name: str, states: Sequence[StateSpec], rows: int) -> None:
        self._name, self._states, self._rows = name, tuple(states), rows
        self._length = self._moves = 0
        self._arrays: list[Array] = []

    def fit(self, length: int, *, keep: bool = True) -> None:
        """Positions for `length` or a little more; what the rows hold stays if it is to be kept."""
        if length <= self._length <= length + length // 4:
            return
        self._length = 0  # until all have moved: where memory runs out on the way, the next launch moves them again
        self._moves += 1
        self._arrays = self._arrays or [np.empty(0) for _ in self._states]
        for index, state in enumerate(self._states):  # one by one: the old ones are let go on the way
            moved, before = zeros(state, self._rows, length), self._arrays[index]
            if keep and before.size:
                kept = min(length, _count(before, state))
                _first(moved, state, kept)[...] = _first(before, state, kept)
            self._arrays[index] = moved
        self._length = length

    def read(self, row: int, count: int) -> list[Array]:
        """A copy of the row's first `count` positions."""
        return [
            _first(array[row : row + 1], state, count).copy()
            for array, state in zip(self._arrays, self._states, strict=True)
        ]

    def write(self, row: int, content: Sequence[Array]) -> None:
        """What `read` gave."""
        for array, state, values in zip(self._arrays, self._states, content, strict=False):
            _first(array[row : row + 1], state, _count(values, state))[...] = values

    def placed(self, slots: range, lengths: NDArray[np.int64], *, first: int) -> Placed:
        """The rows from `first` on, for these slots."""
        rows = slice(first, first + len(slots))
        return Placed(
            slots=slots,
            lengths=lengths,
            visible=self._length,
            memory=(self._name, self._moves),
            states=lambda: tuple(
                _bound(state, array[rows]) for state, array in zip(self._states, self._arrays, strict=True)
            ),
        )


def lengths_of(computed: range, slots: Sequence[int], held: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """What each computed row holds. One between the rows of a launch that ended at the end of its cache is moved
    back to `most`, over positions that no answer reaches."""
    lengths = np.minimum(held[computed], most)
    lengths[[slot - computed.start for slot in slots]] = held[list(slots)]
    return lengths


def _bound(state: StateSpec, array: Array) -> Bound:
    return Bound(
        input=state.input,
        output=state.output,
        dtype=array.dtype.type,
        shape=array.shape,
        address=array.ctypes.data,
    )


def zeros(state: StateSpec, rows: int, length: int) -> Array:
    """The state of `rows` rows of `length` positions. Zeroed: what a row has not written is masked, and a masked NaN
    would still be a NaN."""
    return np.zeros(state.sizes(rows, length), state.dtype)


def _first(array: Array, state: StateSpec, count: int) -> Array:
    """A view of the first positions of every row; all of a state that has none."""
    if "capacity" not in state.shape:
        return array
    return array[(slice(None),) * state.shape.index("capacity") + (slice(count),)]


def _count(values: Array, state: StateSpec) -> int:
    return values.shape[state.shape.index("capacity")] if "capacity" in state.shape else 0
