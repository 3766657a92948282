"""How many of the drafted tokens a step verifies: schedules by batch size, and lists for a controller.

The functions raise ValueError, so that they serve as pydantic validators too; the message is the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

ALL_WIDTHS = "all"
"""The adaptive list that names every width from 1 to the number of drafted tokens."""


def whole_number(value: object) -> object:
    """Refuses true and false where a count is meant: pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"a whole number is needed, not {value}")
    return value


Count = Annotated[int, BeforeValidator(whole_number)]


class VerifyWidthRange(BaseModel):
    """One line of a schedule: decode batches of these sizes verify this many drafts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_start: Count
    """Smallest decode batch size of the range."""
    batch_end: Count
    """Largest decode batch size of the range; belongs to it."""
    num_tokens: Count
    """Drafts to verify. 0 verifies none, and skips drafting where the architecture can."""


def schedule_triples(ranges: Iterable[VerifyWidthRange]) -> list[tuple[int, int, int]]:
    """The ranges sorted as (start, end, count); ValueError if they are not a usable schedule."""
    triples = sorted((item.batch_start, item.batch_end, item.num_tokens) for item in ranges)
    if not triples:
        raise ValueError("the schedule is empty; give at least one range, or leave it unset")
    for start, end, count in triples:
        if start < 1 or end < start:
            raise ValueError(f"batch sizes {start} to {end} are not a range; it needs 1 <= start <= end")
        if count < 0:
            raise ValueError(f"batch sizes {start} to {end} ask to verify {count} tokens; the least is 0")
    if triples[0][0] != 1:
        raise ValueError(f"the first range starts at batch size {triples[0][0]}; it must start at 1")
    for (start, end, _), (next_start, next_end, _) in pairwise(triples):
        if next_start <= end:
            raise ValueError(f"batch sizes {start} to {end} and {next_start} to {next_end} overlap")
    return triples


def scheduled_width(schedule: Sequence[tuple[int, int, int]], batch_size: int, num_drafts: int) -> int:
    """The width `schedule` gives a decode batch; a gap and the tail carry the previous count forward."""
    width = schedule[0][2]
    for start, _, count in schedule:
        if start > batch_size:
            break
        width = count
    return min(width, num_drafts)


@dataclass(frozen=True, slots=True)
class WidthSchedule:
    """A schedule as a runtime goes by it, and as a command line names it: 1:4,8:2,16:0."""

    ranges: tuple[tuple[int, int, int], ...]
    """As schedule_triples gives them. Each goes on to the next one."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The schedule of "1:4,8:2,16:0": from 1 row in a step on 4 drafts are verified, from 8 on 2, from 16 on none.
        ValueError if it is none."""
        pairs = [[part.strip() for part in entry.split(":")] for entry in text.split(",")]
        if not all(len(pair) == 2 and all(part.isascii() and part.isdigit() for part in pair) for pair in pairs):
            raise ValueError(f"{text!r} is not a schedule of widths by batch size, such as 1:4,8:2,16:0")
        numbers = [(int(size), int(width)) for size, width in pairs]
        ranges = [VerifyWidthRange(batch_start=size, batch_end=size, num_tokens=width) for size, width in numbers]
        return cls(tuple(schedule_triples(ranges)))

    def __str__(self) -> str:
        return ",".join(f"{start}:{width}" for start, _, width in self.ranges)

    @property
    def widths(self) -> tuple[int, ...]:
        """Those in it, ascending."""
        return tuple(sorted({width for _, _, width in self.ranges}))

    def at(self, batch_size: int) -> int:
        """The width of a step of so many rows."""
        return scheduled_width(self.ranges, batch_size, self.widths[-1])


def parse_widths(text: str) -> tuple[int, ...] | None:
    """The widths of a list such as "1,3,5", sorted and without repeats; None for "all"."""
    if text.strip() == ALL_WIDTHS:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.isdigit()):
            raise ValueError(f"{text!r} is not a list of widths such as 1,3,5 and not {ALL_WIDTHS!r}")
    widths = tuple(sorted({int(entry) for entry in entries}))
    if widths[0] < 1:
        raise ValueError("width 0 cannot be listed: a step that verifies nothing could never widen again")
    return widths


def adaptive_widths(text: str, num_drafts: int) -> tuple[int, ...]:
    """The widths a controller chooses among when `num_drafts` tokens are drafted."""
    widths = parse_widths(text)
    if widths is None:
        return tuple(range(1, num_drafts + 1))
    if widths[-1] > num_drafts:
        raise ValueError(
            f"width {widths[-1]} cannot be verified when {num_drafts} tokens are drafted; "
            f"raise num_speculative_tokens or list widths from 1 to {num_drafts}"
        )
    return widths
