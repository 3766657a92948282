"""What a step costs, by width and rows, from the steps that were run.

Of the steps of so many rows:  seconds = cost of the width + slope · longest row

The slope is common to all widths, so that one which was last used in a short context is not taken for a cheap one.
Costs are lower quartiles: a machine with other work to do has slow steps now and then, and no fast ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

_NEWEST, _KEPT = 16, 64
"""Steps of a width that its cost and the slope are of."""
_WORKED_OUT = 8
"""Steps from one time that costs are worked out to the next, once there are a few."""
_ASSUMED = 0.05
"""What a draft adds to the cost of a step, as a share, until two widths were timed."""
_FIRST, _LONGEST = 8, 256
"""Steps of so many rows from one probe to the next: doubled each time, up to the longest."""
BURST = 3
"""Steps of a probe: the first of a shape may pay for what is set up lazily."""


@dataclass(slots=True)
class _Table:
    """Steps of one number of rows."""

    samples: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    """By width: (longest row, seconds)."""
    newest: dict[int, int] = field(default_factory=dict)
    """By width: the number of the step that was timed last."""
    costs: dict[int, float] = field(default_factory=dict)
    uncounted: int = 0
    """Steps that `costs` does not know."""
    steps: int = 0
    """Asked for."""
    probe_at: int = _FIRST
    interval: int = _FIRST
    probing: int = 0
    """Steps left of the probe."""
    probed: int = 0
    """Its width."""


class StepTimes:
    """Of one engine."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}

    def add(self, *, width: int, num_rows: int, longest: int, seconds: float) -> None:
        """A step was timed; `longest`: positions of the longest of its rows."""
        table = self._table(num_rows)
        table.samples.setdefault(width, deque(maxlen=_KEPT)).append((float(longest), seconds))
        table.newest[width] = table.steps
        table.uncounted += 1

    def of(self, widths: Iterable[int], num_rows: int) -> dict[int, float]:
        """What a step of so many rows costs at each width. Only ratios of these mean anything: of a number of rows
        that was not timed at two widths, they are those of the nearest that was."""
        timed = [rows for rows, table in self._tables.items() if len(table.samples) > 1]
        nearest = min(timed, key=lambda rows: abs(math.log(rows / num_rows)), default=num_rows)
        known = self._costs(self._table(nearest))
        return {width: _at(known, width) for width in widths}

    def probe(self, widths: Iterable[int], num_rows: int) -> int | None:
        """Asked before each step: the width that is to be timed again, if it is time for that. After n steps of so
        many rows, at most BURST · (6 + n / 256) were probes."""
        table = self._table(num_rows)
        table.steps += 1
        if not table.probing and table.steps >= table.probe_at:
            table.interval = min(2 * table.interval, _LONGEST)
            table.probe_at = table.steps + table.interval
            table.probing, table.probed = BURST, _least_known(list(widths), table.newest)
        if not table.probing:
            return None
        table.probing -= 1
        return table.probed

    def _table(self, num_rows: int) -> _Table:
        return self._tables.setdefault(num_rows, _Table())

    @staticmethod
    def _costs(table: _Table) -> Mapping[int, float]:
        few = len(table.samples) > len(table.costs) or sum(map(len, table.samples.values())) < _NEWEST
        if table.uncounted >= _WORKED_OUT or (table.uncounted and few):
            table.costs, table.uncounted = costs(table.samples), 0
        return table.costs


def costs(samples: Mapping[int, Iterable[tuple[float, float]]]) -> dict[int, float]:
    """Seconds of each width, at the mean length of all steps, from its (length, seconds)."""
    listed = {width: list(pairs) for width, pairs in samples.items()}
    if not listed:
        return {}
    slope = _slope(listed.values())
    mean = fmean(length for pairs in listed.values() for length, _ in pairs)
    return {
        width: max(_quartile(seconds - slope * (length - mean) for length, seconds in pairs[-_NEWEST:]), 1e-9)
        for width, pairs in listed.items()
    }


def _quartile(values: Iterable[float]) -> float:
    """The lower one; the least of up to four."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def _slope(groups: Iterable[list[tuple[float, float]]]) -> float:
    """Seconds for each position, common to all groups, by least squares; what is slow beyond reason is left out. Less
    than that where it may be chance, down to 0 at two standard errors: it is used far from where it was seen."""
    count, spread, above, residue = 0, 0.0, 0.0, 0.0
    for pairs in groups:
        limit = 1.5 * median(seconds for _, seconds in pairs)
        usual = [(length, seconds) for length, seconds in pairs if seconds <= limit]
        length, seconds = fmean(x for x, _ in usual), fmean(y for _, y in usual)
        count += len(usual) - 1
        spread += sum((x - length) ** 2 for x, _ in usual)
        above += sum((x - length) * (y - seconds) for x, y in usual)
        residue += sum((y - seconds) ** 2 for _, y in usual)
    if count < 2 or not spread or above <= 0:
        return 0.0
    slope = above / spread
    error = max(residue - slope * above, 0.0) / (count - 1) / spread  # squared
    return slope * max(1 - 4 * error / slope**2, 0.0)


def _at(known: Mapping[int, float], width: int) -> float:
    """On the line through the two widths nearest to it that were timed."""
    if width in known:
        return known[width]
    if len(known) < 2:
        timed, seconds = next(iter(known.items()), (0, 1.0))
        return seconds * (1 + _ASSUMED * width) / (1 + _ASSUMED * timed)
    below = [timed for timed in known if timed < width]
    above = [timed for timed in known if timed > width]
    if below and above:
        left, right = max(below), min(above)
    else:
        left, right = sorted(known, key=lambda timed: abs(timed - width))[:2]
    slope = (known[right] - known[left]) / (right - left)
    return max(known[left] + slope * (width - left), min(known.values()) / 2)


def _least_known(widths: list[int], newest: Mapping[int, int]) -> int:
    """The one that was timed longest ago; of those that never were, an end, which says most of the others."""
    ends = (widths[0], widths[-1])
    return min(widths, key=lambda width: (newest.get(width, -1), width not in ends, width))
