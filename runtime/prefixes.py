"""Which tokens the caches hold, and where: a prompt that begins like an earlier one is read faster.

free slots     the whole of their last request
running ones   their prompts
places         what slots held before others took them, kept by the engine beside its slots
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

_WORTH = 16
"""Tokens that it takes for a copy to pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The first `length` positions of one row's caches, to another row or place; 0: it lets go of its memory."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The slot that a request gets."""

    slot: int
    kept: int
    """Of its prompt's tokens, how many are in the slot's caches once the copies are made."""
    copies: tuple[Copy, ...] = ()
    """In this order, before the slot is given to the request."""


class Prefixes:
    """What every slot and place holds, newest last."""

    def __init__(self, num_slots: int, *, num_places: int = 0, most_stored: int = 0) -> None:
        """`num_places`: as an engine says (engine.py). `most_stored`: tokens in all places beside the slots."""
        self._num_slots, self._copies, self._most_stored = num_slots, num_places > 0, most_stored
        self._unused = list(range(num_slots, num_places))
        self._held: dict[int, Tokens] = {}

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot's caches hold these tokens, and will until it is taken."""
        self._held.pop(slot, None)
        self._held[slot] = np.array(tokens, np.int64)

    def forget(self, slot: int) -> None:
        """Nothing is known of the slot's caches."""
        self._held.pop(slot, None)

    def forget_stored(self) -> tuple[Copy, ...]:
        """Nothing is known of the places beside the slots: a copy may have failed. What lets go of their memory."""
        return self._emptied([number for number in self._held if number >= self._num_slots])

    def take(self, free: Collection[int], prompt: Sequence[int]) -> Taken:
        """The free slot for a prompt.

        One position less is kept than what is common: a drafter's cache at a position knows the token after it. One
        prompt token at least is run, for its logits.
        """
        wanted = np.array(prompt, np.int64)
        kept = {number: _usable(held, wanted) for number, held in self._held.items()}
        # Else the lowest: an engine runs the range of slots that holds a step's rows.
        slot = max(sorted(free), key=lambda number: kept.get(number, 0))
        best = max(kept, key=lambda number: kept[number], default=slot) if self._copies else slot
        if kept.get(best, 0) - kept.get(slot, 0) < _WORTH:
            best = slot
        copies = self._saved(slot, kept.get(slot, 0) if best == slot else 0, spared=best)
        if best != slot:
            copies = (*copies, Copy(source=best, target=slot, length=kept[best]))
            self._renew(best)
        self.forget(slot)
        return Taken(slot=slot, kept=kept.get(best, 0), copies=copies)

    def _saved(self, slot: int, reused: int, *, spared: int) -> tuple[Copy, ...]:
        """Saves what a slot holds before it is taken, unless it is used on or is held elsewhere. What was used
        longest ago makes room, but not the place that is `spared`."""
        held = self._held.get(slot)
        if held is None or len(held) - reused < _WORTH:
            return ()
        if any(number != slot and _common(other, held) == len(held) for number, other in self._held.items()):
            return ()
        leaving = self._leaving_for(len(held), spared)
        if leaving is None:
            return ()
        emptied = self._emptied(leaving)
        place = self._unused.pop()
        self._held[place] = held
        return (*emptied, Copy(source=slot, target=place, length=len(held)))

    def _leaving_for(self, length: int, spared: int) -> list[int] | None:
        """The places to empty for this many tokens; None: there is no room."""
        stored = [number for number in self._held if number >= self._num_slots]
        room = self._most_stored - sum(len(self._held[number]) for number in stored)
        leaving = list[int]()
        for number in (number for number in stored if number != spared):
            if room >= length and (self._unused or leaving):
                break
            leaving.append(number)
            room += len(self._held[number])
        if room < length or not (self._unused or leaving):
            return None
        return leaving

    def _emptied(self, places: Collection[int]) -> tuple[Copy, ...]:
        for number in places:
            self.forget(number)
            self._unused.append(number)
        return tuple(Copy(source=number, target=number, length=0) for number in places)

    def _renew(self, number: int) -> None:
        self._held[number] = self._held.pop(number)


def _usable(held: Tokens, prompt: Tokens) -> int:
    return max(min(_common(held, prompt), len(prompt) - 1) - 1, 0)


def _common(left: Tokens, right: Tokens) -> int:
    """Tokens that both begin with."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length
