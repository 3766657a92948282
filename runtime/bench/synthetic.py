"""Drafts that are right at a given rate, in place of the drafter's: what a draft of that acceptance would bring.

    step ─▶ the drafter's drafts: replaced before the next step verifies them
              right with probability b each: the answer's own tokens; wrong: any other token

The answer is known from a run at width 0, and the same at every width. The drafter runs, so that its time counts, and
the accept rule judges as ever, so that the output stays the true one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ..engine import NO_TOKEN, Chunk, Engine, Pending, StepResult
from ..generate import LoadedBundle
from ..sampling import SamplingParams, uniform_table
from ..width_policy import AUTO, Width
from .measuring import Case, plain_recorder
from .recorder import Recorder

_TOLERANCE = 1e-9
"""Of b: MAX's."""


@runtime_checkable
class TakesDrafts(Engine, Protocol):
    """An engine whose drafts can be replaced."""

    def replace_drafts(self, slot: int, drafts: NDArray[np.int64]) -> None:
        """The row's drafts become these, i64[K] (-1: none); in order with launches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticAcceptance:
    """How often the drafts of a benchmark were right."""

    rate: float
    """Share of the drafts of a step that are accepted, in the mean of many."""
    bases: Mapping[str, float]
    """b by width: the chance of each draft to be right. A schedule has that of its widest, "auto" that of the bundle's
    widest."""

    def tokens_per_step(self, width: int) -> float:
        """That a row should commit in a step, its bonus token included: 1 + b + … + b^width."""
        return 1.0 + self.rate * width

    def sentence(self) -> str:
        """For the reader."""
        bases = ", ".join(f"b = {base:.4f} at width {width}" for width, base in self.bases.items())
        return f"Synthetic acceptance rate {self.rate:g} ({bases}): the speeds are of such a draft, not of this one."


def synthetic_acceptance(rate: float, widths: Iterable[Width], widest: int) -> SyntheticAcceptance:
    """Calibrated for each width in use; 0 verifies no draft. `widest`: of the bundle."""
    used = [width for width in widths if _most(width, widest)]
    calibrated = {str(width): _most(width, widest) for width in used}
    return SyntheticAcceptance(
        rate=rate, bases={width: base_probability(rate, number) for width, number in calibrated.items()}
    )


def _most(width: Width, widest: int) -> int:
    if isinstance(width, int):
        return width
    return widest if width == AUTO else width.widths[-1]


def base_probability(rate: float, width: int) -> float:
    """b with mean_{i=1..width} b^i = rate: a draft is accepted with probability b if those before it were, so that of
    `width` ≥ 1 drafts that share is. A rate beyond 0 or 1 is 0 or 1."""
    if rate <= 0 or rate >= 1:
        return min(max(rate, 0.0), 1.0)
    low, high = 0.0, 1.0
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        if sum(survival(middle, width)) < rate * width:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def survival(base: float, width: int) -> list[float]:
    """For each of so many drafts, how likely it is accepted."""
    return list(accumulate(repeat(base, width), mul))


def synthetic_drafts(
    answer: Sequence[int], base: float, *, seed: int, num_drafts: int, vocabulary: int
) -> NDArray[np.int64]:
    """What is proposed after the first n tokens of an answer, for each n: i64[len(answer) + 1, K]; past its end: -1.

    Whether a draft is right depends on the seed, n and its place alone, and so is the same in every run and batch.
    """
    # The first column is the one that the answer itself is drawn with.
    draws = uniform_table(seed, len(answer) + 1, 1 + 2 * num_drafts)[:, 1:].astype(np.float64)
    is_right, other = draws[:, :num_drafts] < base, draws[:, num_drafts:]
    right = sliding_window_view(np.array([*answer, *[NO_TOKEN] * num_drafts], np.int64), num_drafts)
    wrong = (right + 1 + (other * (vocabulary - 1)).astype(np.int64)) % vocabulary
    return np.where(is_right | (right == NO_TOKEN), right, wrong)


def synthetic_recorder(
    acceptance: SyntheticAcceptance, answers: Mapping[int, Sequence[int]], bundle: LoadedBundle, case: Case
) -> Recorder:
    """A case's, of a bundle whose engine TakesDrafts. `answers`: the true ones by the number of the prompt."""
    engine, manifest = bundle.engine, bundle.manifest
    if str(case.width) not in acceptance.bases:
        return plain_recorder(bundle, case)
    assert isinstance(engine, TakesDrafts)
    draft = partial(
        synthetic_drafts,
        base=acceptance.bases[str(case.width)],
        num_drafts=manifest.num_draft_tokens,
        vocabulary=manifest.pair.target.vocab_size,
    )
    return SyntheticRecorder(engine, case.batch, lambda seed: draft(answers[seed], seed=seed))


class SyntheticRecorder(Recorder):
    """A Recorder of steps whose drafts are replaced as soon as they are read."""

    def __init__(
        self,
        engine: TakesDrafts,
        num_slots: int,
        drafts: Callable[[int], NDArray[np.int64]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafts`: synthetic_drafts of the request with this seed."""
        super().__init__(engine, num_slots, clock)
        self._taking, self._drafts = engine, drafts
        self._rows: dict[int, _Row] = {}

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        """A request that names its seed."""
        super().admit(slot, params, uniform, kept=kept)
        assert params.seed is not None, "a benchmark gives each prompt its own"
        self._rows[slot] = _Row(self._drafts(params.seed))

    def prefill(self, chunk: Chunk) -> Pending:
        """Drafts come with the prompt's end."""
        pending = super().prefill(chunk)
        return pending if chunk.next_token != NO_TOKEN else _Replaced(pending, self._replace)

    def step(self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False) -> Pending:
        """Verifies what was put there, and drafts anew for nothing."""
        return _Replaced(super().step(slots, width, num_drafts=num_drafts, logits=logits), self._replace)

    def _replace(self, result: StepResult) -> StepResult:
        drafts = np.empty_like(result.drafts)
        for index, slot in enumerate(result.slots):
            row = self._rows[slot]
            row.count += len(result.tokens(index))
            # The target's own token may be one beyond what the answer took.
            proposed = row.drafts[min(row.count, len(row.drafts) - 1)].copy()
            proposed[drafts.shape[1] :] = NO_TOKEN  # what was not asked for is not there to be right either
            drafts[index] = proposed[: drafts.shape[1]]
            self._taking.replace_drafts(slot, proposed)
        return replace(result, drafts=drafts)


@dataclass(slots=True)
class _Row:
    """An answer under way."""

    drafts: NDArray[np.int64]
    count: int = 0
    """Tokens committed."""


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A launch whose drafts are replaced when it is read."""

    pending: Pending
    replaced: Callable[[StepResult], StepResult]

    def result(self) -> StepResult:
        return self.replaced(self.pending.result())
