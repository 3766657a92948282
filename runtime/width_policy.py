"""Which width a step runs at: the one that commits most tokens a second.

    rows ─▶ chance of each draft ─▶ tokens a step, by width ┐
    steps that were run ─▶ seconds of a step, by width ─────┴▶ the width with the best ratio

Drafts that a step does not verify are no loss to the statistics: every step tells the host what it proposed, and the
tokens that are committed later tell which of it was right, at any width (the token at a position depends on no draft,
design §4.1). So nothing is to be explored but times, and drafts where a step proposes no more than the next one will
verify: now and then it proposes all. What is known of a row is a step old where steps are launched before the last one
is read; chances are learned by what was known when the step was launched.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import mul
from typing import Final, Literal, NamedTuple, Protocol

from graphspec.errors import RequestError
from graphspec.verify_width import WidthSchedule

from .engine import NO_TOKEN
from .step_times import StepTimes

AUTO: Final = "auto"
Width = int | Literal["auto"] | WidthSchedule
"""Drafts verified in a step; or that the policy chooses; or by the rows that are stepped at once."""

_NOTHING, _COLD = 0, 1
_STREAKS = (1, 4)
"""Tokens foreseen in a row from which on a row is another case: drafts that were right are likely to go on so."""
_REMEMBERED, _REMEMBERED_OF_ROW = 512, 32
"""Trials of a draft that its chance rests on, of the engine and of a request."""
_WEIGHT_OF_ALL = 6.0
"""Trials that the engine's chance is worth in a request's."""
_ALL_DRAFTS_EVERY = 16
"""Steps, of which one proposes all drafts: what those are worth that are seldom asked for is known by that."""
_UNKNOWN = 0.5, 2.0
"""A chance before anything is known, and the trials that it is worth."""


def checked_width(width: Width | str | None, widths: Sequence[int]) -> Width:
    """What is meant, for a bundle of these widths, ascending; None: the widest. A text may name a schedule. Raises
    RequestError."""
    if width is None:
        return widths[-1]
    if width == AUTO:
        return AUTO
    if isinstance(width, str) and ":" in width:
        try:
            width = WidthSchedule.parse(width)
        except ValueError as error:
            raise RequestError(f"width: {error}") from None
    known = ", ".join(map(str, widths))
    if isinstance(width, WidthSchedule):
        if missing := [one for one in width.widths if one not in widths]:
            raise RequestError(
                f"width {missing[0]} of the schedule {width} is not in this bundle; it was built for {known}"
            )
        return width
    if isinstance(width, bool) or not isinstance(width, int) or width not in widths:
        raise RequestError(f"width {reprlib.repr(width)} is not in this bundle; it was built for {known}, or auto")
    return width


@dataclass(slots=True)
class Chances:
    """How likely a draft is right if those before it were, by case and position. Old trials count less and less."""

    remembered: int
    _counts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Trials, and those that went well."""

    def add(self, case: int, position: int, right: bool) -> None:
        """A trial."""
        trials, well = self._counts.get((case, position), (0.0, 0.0))
        kept = 1 - 1 / self.remembered
        self._counts[case, position] = trials * kept + 1, well * kept + right

    def at(self, case: int, position: int, prior: float, weight: float) -> float:
        """The chance; `prior` counts as much as `weight` trials."""
        trials, well = self._counts.get((case, position), (0.0, 0.0))
        return (well + weight * prior) / (trials + weight)


@dataclass(slots=True)
class _Trial:
    """Drafts on their way to be judged."""

    drafts: tuple[int, ...]
    case: int
    judged: int = 0
    """Of them, those that were right."""
    missed: bool = False
    """Whether the next one was wrong."""


@dataclass(slots=True)
class History:
    """What one request's drafts were worth so far."""

    chances: Chances = field(default_factory=lambda: Chances(_REMEMBERED_OF_ROW))
    drafts: tuple[int, ...] | None = None
    """The newest that are known, without those that are none; None: nothing was read yet."""
    num_proposed: int = 1
    """Those with what is none; 0: none was asked for."""
    launched: deque[tuple[int, bool]] = field(default_factory=deque)
    """Of each step in flight: the case, and whether its drafts were known."""
    trials: list[_Trial] = field(default_factory=list)
    streak: int = 0
    """Newest tokens that were foreseen."""

    @property
    def case(self) -> int:
        """Those that the chances of the next step are told apart by."""
        if self.drafts is None or not self.num_proposed:
            return _COLD
        return _COLD + sum(self.streak >= least for least in _STREAKS) if self.drafts else _NOTHING


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row of the next step."""

    history: History
    left: int
    """Tokens that its answer may still take."""
    read: bool
    """Whether everything launched for it was read: its drafts are known then."""
    num_drafts: int | None = None
    """Asked for in its newest launch; None: all."""


class Choice(NamedTuple):
    """Of a step."""

    width: int
    num_drafts: int
    """To propose at least: the width that the step after it is expected to have."""


class WidthPolicy(Protocol):
    """What a loop asks for the widths of rows that name none."""

    def choose(self, rows: Sequence[Candidate]) -> Choice:
        """Of the step of these rows that is launched next."""
        ...

    def read(self, history: History, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """A row's prompt, or a step of it, was read: what it committed, and its new drafts (-1: none)."""
        ...

    def timed(self, choice: Choice, *, num_rows: int, longest: int, seconds: float) -> None:
        """A step took so long; `longest`: positions of its longest row."""
        ...


class AdaptiveWidths:
    """The policy "auto", for one engine."""

    def __init__(self, widths: Sequence[int], *, on_demand: bool = False) -> None:
        """`widths`: those of the bundle, ascending. `on_demand`: a draft that is not asked for costs nothing."""
        self._widths, self._on_demand = tuple(widths), on_demand
        self._steps = 0
        self._chances = Chances(_REMEMBERED)
        self._times = StepTimes()

    def choose(self, rows: Sequence[Candidate]) -> Choice:
        """One width for all rows, now and then one whose time is to be known better."""
        self._steps += 1
        seconds, probed = self._times.of(self._widths, len(rows)), self._times.probe(self._widths, len(rows))
        width = best_width([self._survival(row) for row in rows], seconds) if probed is None else probed
        if not self._on_demand or self._steps % _ALL_DRAFTS_EVERY == 0:
            num_drafts = self._widths[-1]
        elif probed is not None:
            num_drafts = probed  # what is timed is a step among others of its width
        else:
            num_drafts = best_width([self._chances_of(row, self._widths[-1]) for row in rows], seconds)
        for row in rows:
            row.history.launched.append((row.history.case, row.read))
        return Choice(width, num_drafts)

    def read(self, history: History, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Judges the drafts that are waiting for these tokens."""
        if history.drafts is not None:
            case, known = history.launched.popleft()
            missing = 0 if known else history.num_proposed - len(history.drafts)
            newest = _Trial((*history.drafts, *[NO_TOKEN] * missing), case)
            for trial in (waiting := [*history.trials, newest]):
                self._judge(trial, history.chances, tokens)
            history.trials = [one for one in waiting if not one.missed and one.judged < len(one.drafts)]
            history.streak = history.streak + len(tokens) if newest.drafts and not newest.missed else 0
        history.drafts = tuple(takewhile(lambda draft: draft != NO_TOKEN, drafts))
        history.num_proposed = len(drafts)

    def timed(self, choice: Choice, *, num_rows: int, longest: int, seconds: float) -> None:
        """Notes it, if it tells what steps of its width cost."""
        width, num_drafts = choice
        if num_drafts == width or not self._on_demand:
            self._times.add(width=width, num_rows=num_rows, longest=longest, seconds=seconds)

    def _judge(self, trial: _Trial, own: Chances, tokens: Sequence[int]) -> None:
        for token, draft in zip(tokens, trial.drafts[trial.judged :], strict=False):
            for chances in (own, self._chances):
                chances.add(trial.case, trial.judged, draft == token)
            if draft != token:
                trial.missed = True
                return
            trial.judged += 1

    def _survival(self, row: Candidate) -> list[float]:
        """For each draft that may count, how likely it is accepted."""
        history = row.history
        asked = self._widths[-1] if row.num_drafts is None else row.num_drafts
        return self._chances_of(row, len(history.drafts or ()) if row.read else asked)

    def _chances_of(self, row: Candidate, known: int) -> list[float]:
        """The same if so many were proposed."""
        history, case = row.history, row.history.case
        chances = [
            history.chances.at(case, position, self._chances.at(case, position, *_UNKNOWN), _WEIGHT_OF_ALL)
            for position in range(min(known, self._widths[-1], max(row.left - 1, 0)))
        ]
        return list(accumulate(chances, mul))


def expected_tokens(survival: Sequence[float], width: int) -> float:
    """That a row commits in a step, its bonus token included; `survival[i]`: the chance that draft i is accepted."""
    return 1.0 + sum(survival[:width])


def best_width(rows: Sequence[Sequence[float]], seconds: Mapping[int, float]) -> int:
    """The width among those of `seconds` (what a step costs) with the most tokens a second of all rows, each given by
    the chances that its drafts are accepted; of equals, the narrowest."""
    return max(sorted(seconds), key=lambda width: sum(expected_tokens(row, width) for row in rows) / seconds[width])
