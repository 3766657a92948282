"""Which tokens the caches of free slots still hold, so that a prompt that begins like an earlier one is read faster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile


class Prefixes:
    """The tokens of each slot's last request."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[int, ...]] = {}

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot's request ended whole: prompt and answer. The last token was not run."""
        self._tokens[slot] = tuple(tokens[:-1])

    def take(self, free: Collection[int], prompt: Sequence[int]) -> tuple[int, int]:
        """The free slot for a prompt, and how many of its tokens are kept there.

        The slot that holds most of it, else the lowest: an engine runs the range of slots that holds a step's rows.
        One position less than what is common: a drafter's cache at a position knows the token after it. One prompt
        token at least is run, for its logits.
        """
        kept = {slot: _common(self._tokens.get(slot, ()), prompt) for slot in free}
        slot = max(sorted(free), key=lambda slot: kept[slot])
        self._tokens.pop(slot, None)
        return slot, max(min(kept[slot], len(prompt) - 1) - 1, 0)


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, prompt, strict=False)))
