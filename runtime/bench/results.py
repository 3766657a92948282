"""What a benchmark found, as it is printed, drawn and written as JSON.

Seconds and milliseconds are means over whole runs but for `step_alone_ms`, a median. `tokens_per_second` are those
after the first of each answer, over the time that is not the prompts'.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from graphspec.errors import EngineError

from ..acceptance import AcceptanceReport, AcceptanceStatistics
from ..width_policy import AUTO, Width
from .measuring import Answered, Asked, Case, Measured
from .synthetic import SyntheticAcceptance

WidthName = int | str
"""A width as reports have it: "auto" and a schedule in words."""

_AS_MEASURED = "τ is the tokens a row commits in a step with the bonus token, as these answers had it"
_AS_CALIBRATED = (
    "τ = 1 + b + … + b^W is the tokens that a row should commit in a step with the bonus token, as it does but for the "
    "end of an answer, where there is less to draft"
)
_NOTES = [
    "tokens/s, speedup: all rows together, tokens after the first of each answer, over the time that no prompt took. "
    "The geometric mean is of each prompt's own speedup.",
    "predicted: τ·t(0)/t(W). {tau}; t are medians of single steps with every row in use, timed apart from the answers. "
    "Verifying and drafting are one graph, so that t(W)/t(0) stands for 1 + γc + v as a whole.",
    "Width 0 runs the same graph and keeps the drafter's caches (engines draft there too): a bundle without a drafter "
    "would be a little faster there.",
    "host: the part of a step in which the device waits, with no overlap; graphspec run hides most of it.",
    "TTFT: from a row to the first token, median; at a batch above 1, with the prompts that came before in between.",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One batch size and width."""

    batch: int
    width: WidthName
    prompts: int
    tokens: int
    tokens_per_second: float
    end_to_end_tokens_per_second: float
    """Prompts' time included."""
    speedup: float
    """tokens_per_second by that of width 0 of the batch."""
    geometric_mean_speedup: float | None
    """Of each prompt's own; None: no answer had two tokens."""
    predicted_speedup: float | None
    """Tokens a step, those expected where acceptance is synthetic, by cost_ratio; None: "auto" runs steps of several
    widths, as may a schedule."""
    cost_ratio: float | None
    """step_alone_ms by that of width 0: 1 + γc + v."""
    acceptance: AcceptanceReport
    tokens_per_step: float
    """Of one row, with the bonus token; 1 at width 0, and in the steps of "auto" that verify nothing."""
    rows_per_step: float
    step_ms: float
    device_ms: float | None
    """Of step_ms; None: this engine does not tell."""
    host_ms: float | None
    step_alone_ms: float | None
    ttft_ms: float
    """Median over the prompts: from a row to the first token, with what other prompts of the batch took before."""
    prefill_ms: float
    """Mean of one prompt, alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryResult:
    """One category at batch 1 and one width."""

    category: str
    width: WidthName
    prompts: int
    tokens_per_second: float
    speedup: float
    acceptance: AcceptanceReport
    tokens_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The fastest width of a batch size."""

    batch: int
    width: WidthName
    speedup: float

    def sentence(self) -> str:
        """For the reader."""
        if not self.width:
            return f"Batch {self.batch}: width 0 is fastest: no speculation pays."
        named = self.width if self.width == AUTO else f"width {self.width}"
        return f"Batch {self.batch}: {named} is fastest, {self.speedup:.2f} times as fast as width 0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An answer that is not that of the first case."""

    prompt: str
    batch: int
    width: WidthName
    position: int
    """The first token that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Whether every case gave the same tokens as the smallest batch at width 0."""

    equal: bool
    compared: int
    differences: list[Difference]

    def sentence(self) -> str:
        """For the reader."""
        if self.equal:
            return f"Outputs are equal, token for token, at every width and batch size ({self.compared} compared)."
        one = self.differences[0]
        return (
            f"{len(self.differences)} of {self.compared} outputs differ from those of the smallest batch at width 0: "
            f"the first is prompt {one.prompt} at batch {one.batch}, width {one.width}, from token {one.position} on"
        )

    def check(self) -> None:
        """EngineError unless all are equal."""
        if not self.equal:
            raise EngineError(self.sentence())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it."""

    about: dict[str, str]
    """The bundle, the machine and the settings: names and values to print."""
    cases: list[CaseResult]
    categories: list[CategoryResult]
    recommendations: list[Recommendation]
    outputs: Outputs
    synthetic: SyntheticAcceptance | None = None
    """None: drafts are the bundle's own."""

    def to_json(self) -> dict[str, Any]:
        """Under the names of the fields."""
        return asdict(self)

    @property
    def widest(self) -> int:
        """Of the widths."""
        return max(case.width for case in self.cases if isinstance(case.width, int))

    def best(self, batch: int) -> WidthName:
        """The fastest width."""
        return next(one.width for one in self.recommendations if one.batch == batch)

    def notes(self) -> list[str]:
        """What the figures mean."""
        tau = _AS_CALIBRATED if self.synthetic else _AS_MEASURED
        return [note.format(tau=tau) for note in _NOTES]


def report(
    measured: Mapping[Case, Measured],
    asked: Sequence[Asked],
    about: dict[str, str],
    synthetic: SyntheticAcceptance | None = None,
) -> Report:
    """Every case beside width 0 of its batch, which must be among them."""
    return Report(
        about=about,
        cases=(cases := [_case(measured, case, synthetic) for case in sorted(measured)]),
        categories=_categories(measured, asked),
        recommendations=_recommendations(cases),
        outputs=_outputs(measured, asked),
        synthetic=synthetic,
    )


def _case(measured: Mapping[Case, Measured], case: Case, synthetic: SyntheticAcceptance | None) -> CaseResult:
    this, plain = measured[case], measured[Case(case.batch, 0)]
    answers, times = list(this.answers.values()), this.times
    acceptance = _merged(answers)
    per_step = _tokens_per_step(answers)
    expected = synthetic.tokens_per_step(case.width) if synthetic and isinstance(case.width, int) else per_step
    cost = _ratio(_step_alone(this), _step_alone(plain)) if this.steps_alone else None
    step = _ratio(times.steps_wall, times.steps)
    device = None if times.unmeasured else _ratio(times.steps_device, times.steps)
    tokens = sum(len(answer.token_ids) for answer in answers)
    return CaseResult(
        batch=case.batch,
        width=_name(case.width),
        prompts=len(answers),
        tokens=tokens,
        tokens_per_second=_speed(this),
        end_to_end_tokens_per_second=_ratio(tokens, times.steps_wall + times.prompts_wall),
        speedup=_ratio(_speed(this), _speed(plain)),
        geometric_mean_speedup=_geometric_mean(this, plain),
        predicted_speedup=None if cost is None else _ratio(expected, cost),
        cost_ratio=cost,
        acceptance=acceptance.to_json(),
        tokens_per_step=per_step,
        rows_per_step=_ratio(times.rows, times.steps),
        step_ms=step * 1e3,
        device_ms=None if device is None else device * 1e3,
        host_ms=None if device is None else (step - device) * 1e3,
        step_alone_ms=_step_alone(this) * 1e3 if this.steps_alone else None,
        ttft_ms=statistics.median(answer.first for answer in answers) * 1e3,
        prefill_ms=_ratio(times.prompts_wall, len(answers)) * 1e3,
    )


def _name(width: Width) -> WidthName:
    return width if isinstance(width, int) else str(width)


def _categories(measured: Mapping[Case, Measured], asked: Sequence[Asked]) -> list[CategoryResult]:
    found = []
    for name in dict.fromkeys(each.prompt.category for each in asked):
        numbers = [number for number, each in enumerate(asked) if each.prompt.category == name]
        for case in (case for case in sorted(measured) if case.batch == 1):
            answers = [measured[case].answers[number] for number in numbers]
            plain = [measured[Case(1, 0)].answers[number] for number in numbers]
            acceptance, speed = _merged(answers), _speed_of(answers)
            found.append(
                CategoryResult(
                    category=name,
                    width=_name(case.width),
                    prompts=len(answers),
                    tokens_per_second=speed,
                    speedup=_ratio(speed, _speed_of(plain)),
                    acceptance=acceptance.to_json(),
                    tokens_per_step=_tokens_per_step(answers),
                )
            )
    return found


def _recommendations(cases: Sequence[CaseResult]) -> list[Recommendation]:
    best = [
        max((case for case in cases if case.batch == batch), key=lambda case: case.tokens_per_second)
        for batch in dict.fromkeys(case.batch for case in cases)
    ]
    return [Recommendation(batch=case.batch, width=case.width, speedup=case.speedup) for case in best]


def _outputs(measured: Mapping[Case, Measured], asked: Sequence[Asked]) -> Outputs:
    first, *others = sorted(measured)
    differences = [
        Difference(prompt=asked[number].prompt.id, batch=case.batch, width=_name(case.width), position=position)
        for case in others
        for number, answer in measured[case].answers.items()
        if (position := _first_difference(answer.token_ids, measured[first].answers[number].token_ids)) is not None
    ]
    return Outputs(equal=not differences, compared=len(others) * len(asked), differences=differences)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    if left == right:
        return None
    unequal = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))


def _merged(answers: Sequence[Answered]) -> AcceptanceStatistics:
    return reduce(lambda total, answer: total.merge(answer.acceptance), answers, AcceptanceStatistics())


def _tokens_per_step(answers: Sequence[Answered]) -> float:
    """Tokens after the first of each answer by the steps that committed them: passes, and one for each token that
    none committed."""
    passes = _merged(answers)
    alone = max(sum(answer.num_later for answer in answers) - passes.output_tokens, 0)
    steps = passes.verifications + alone
    return (passes.output_tokens + alone) / steps if steps else 1.0


def _speed(measured: Measured) -> float:
    return _ratio(sum(answer.num_later for answer in measured.answers.values()), measured.times.steps_wall)


def _speed_of(answers: Sequence[Answered]) -> float:
    """Of answers that came one after the other."""
    return _ratio(
        sum(answer.num_later for answer in answers), sum(answer.rest for answer in answers if answer.num_later)
    )


def _geometric_mean(this: Measured, plain: Measured) -> float | None:
    """Of what each prompt's answer took at width 0, by what it took here; tokens after the first."""
    pairs = [(plain.answers[number], answer) for number, answer in this.answers.items()]
    logs = [
        math.log((before.rest / before.num_later) / (answer.rest / answer.num_later))
        for before, answer in pairs
        if before.num_later and answer.num_later and before.rest > 0 and answer.rest > 0
    ]
    return math.exp(statistics.fmean(logs)) if logs else None


def _step_alone(measured: Measured) -> float:
    return statistics.median(measured.steps_alone) if measured.steps_alone else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
