"""Runs the same prompts at every width and batch size, in turn, and keeps what each run did.

    round: prompts 1 … 2B ─▶ batch 1: width 0, 2, 4 ─▶ batch 2: … ─▶ steps alone, every batch and width
    round: the next 2B     ─▶ batch 1: width 2, 4, 0 …

So a machine whose speed drifts slows every width alike, and none is always the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from graphspec.errors import GraphspecError

from ..acceptance import AcceptanceStatistics
from ..answer import Generation, Piece, new_answer
from ..engine import NO_TOKEN, Chunk, Engine
from ..generate import LoadedBundle
from ..loop import Loop, Policy
from ..rows import PREFILL_CHUNK, Row
from ..sampling import SamplingParams, uniform_table
from ..width_policy import AUTO, AdaptiveWidths, Width, WidthPolicy
from .prompts import Prompt
from .recorder import Recorder, Times

_BURSTS = 3
"""Of steps alone, in a round, for each batch and width."""
_BURST_STEPS = 5
"""Steps of one burst that are timed, after one that is not."""
_WARM_UP_TOKENS = 8

Progress = Callable[[int, int], None]
"""Runs done, and of how many."""


NewRecorder = Callable[[LoadedBundle, "Case"], Recorder]
"""What a case's answers are run on, one for each run."""


def silent(_done: int, _total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared."""

    batch: int
    width: Width

    def __lt__(self, other: Case) -> bool:
        """By batch, then by width, what is no number last."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, float, str]:
        number = self.width if isinstance(self.width, int) else math.inf
        return self.batch, number, str(self.width)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt's answer in one case; seconds."""

    token_ids: tuple[int, ...]
    acceptance: AcceptanceStatistics
    first: float
    """From a slot to the first token."""
    rest: float
    """From there to the end."""

    @property
    def num_later(self) -> int:
        """Tokens after the first, which comes with the prompt."""
        return max(len(self.token_ids) - 1, 0)


@dataclass(slots=True)
class Measured:
    """All that was measured in one case."""

    times: Times = field(default_factory=Times)
    answers: dict[int, Answered] = field(default_factory=dict)
    """By the prompt's number."""
    steps_alone: list[float] = field(default_factory=list)
    """Seconds of single steps with every row in use, outside of any answer; of a fixed width."""


def fitting(
    bundle: LoadedBundle, prompts: Iterable[Prompt], max_new_tokens: int, count: int
) -> tuple[list[Asked], int]:
    """The first `count` prompts whose answers have room in the bundle, as token ids (through the chat template if
    there is one), and how many before them have not."""
    room = bundle.manifest.max_length - max_new_tokens
    asked, left_out = list[Asked](), 0
    for prompt in prompts:
        if len(asked) == count:
            break
        ids = tuple(_token_ids(bundle, prompt.text))
        if 1 <= len(ids) <= room:
            asked.append(Asked(prompt, ids))
        else:
            left_out += 1
    return asked, left_out


def plain_recorder(bundle: LoadedBundle, case: Case) -> Recorder:
    """Of the bundle's own engine."""
    return Recorder(bundle.engine, case.batch)


def true_answers(
    bundle: LoadedBundle, asked: Sequence[Asked], batch: int, params: SamplingParams, on_progress: Progress = silent
) -> dict[int, tuple[int, ...]]:
    """Each prompt's answer by its number, as `measure` will find it in every case. Raises GraphspecError."""
    found, size, plain = dict[int, tuple[int, ...]](), 2 * batch, Case(batch, 0)
    for start in range(0, len(asked), size):
        on_progress(start, len(asked))
        part = list(enumerate(asked))[start : start + size]
        answers, _ = _answer(bundle, part, plain, params, None, plain_recorder)
        found |= {number: answer.token_ids for number, answer in answers.items()}
    return found


def measure(
    bundle: LoadedBundle,
    asked: Sequence[Asked],
    cases: Sequence[Case],
    params: SamplingParams,
    on_progress: Progress = silent,
    new_recorder: NewRecorder = plain_recorder,
) -> dict[Case, Measured]:
    """Every prompt in every case. Prompt number i has the seed i, in each of them. Raises GraphspecError."""
    measured = {case: Measured() for case in cases}
    # What one answer teaches, the next one knows, as in a server that has run for a while.
    on_demand = bundle.engine.drafts_on_demand
    policies = {
        case: AdaptiveWidths(bundle.manifest.widths, on_demand=on_demand) for case in cases if case.width == AUTO
    }
    short = replace(params, max_new_tokens=min(params.max_new_tokens or 1, _WARM_UP_TOKENS))
    runs = list(_runs(asked, cases))
    on_progress(0, len(runs))
    for case in cases:  # the first step of a new shape pays for what is set up lazily
        _answer(bundle, list(enumerate(asked))[: case.batch], case, short, policies.get(case), new_recorder)
    for done, (case, numbers) in enumerate(runs, start=1):
        if numbers is None:
            measured[case].steps_alone += steps_alone(bundle, asked, case.batch, case.width, params)
        else:
            of_case = [(number, asked[number]) for number in numbers]
            answers, times = _answer(bundle, of_case, case, params, policies.get(case), new_recorder)
            measured[case].answers |= answers
            measured[case].times.add(times)
        on_progress(done, len(runs))
    return measured


def num_rounds(count: int, cases: Sequence[Case]) -> int:
    """Rounds that so many prompts take."""
    return -(-count // _round_size(cases))


def steps_alone(
    bundle: LoadedBundle, asked: Sequence[Asked], batch: int, width: Width, params: SamplingParams
) -> list[float]:
    """Seconds of single steps of `batch` rows that hold the first prompts, drawn as the answers are; all widths from
    the same context. None of one that changes from step to step."""
    if not isinstance(width, int):
        return []
    engine, longest = bundle.engine, (_BURST_STEPS + 1) * (bundle.manifest.widths[-1] + 1)
    room = max(bundle.manifest.max_length - longest, 1)
    for slot in range(batch):
        ids = asked[slot % len(asked)].ids[:room]
        engine.admit(slot, params, uniform_table(0, engine.capacity))
        _prefill(engine, slot, ids)
    seconds = []
    timed = min(_BURST_STEPS, (bundle.manifest.max_length - 1) // (bundle.manifest.widths[-1] + 1) - 1)
    for number in range(timed + 1):
        begun = time.perf_counter()
        engine.step(range(batch), width, num_drafts=width).result()
        if number:
            seconds.append(time.perf_counter() - begun)
    return seconds


def _runs(asked: Sequence[Asked], cases: Sequence[Case]) -> Iterator[tuple[Case, range | None]]:
    """Cases and the numbers of their prompts, in the order in which they run; None: steps alone."""
    size, turn = _round_size(cases), 0
    batches = sorted({case.batch for case in cases})
    for start in range(0, len(asked), size):
        numbers = range(start, min(start + size, len(asked)))
        for batch in batches:
            of_batch = [case for case in cases if case.batch == batch]
            step = 1 if batch == 1 else 2 * batch
            for first in range(0, len(numbers), step):
                turn += 1
                yield from ((case, numbers[first : first + step]) for case in _rotated(of_batch, turn))
        for _ in range(_BURSTS):
            turn += 1
            yield from ((case, None) for case in _rotated(cases, turn))


def _round_size(cases: Sequence[Case]) -> int:
    """Twice the largest batch: as one answer ends, another takes its row. But no fewer than a few prompts."""
    return 2 * max(4, *(case.batch for case in cases))


def _rotated(cases: Sequence[Case], turn: int) -> list[Case]:
    first = turn % len(cases)
    return [*cases[first:], *cases[:first]]


def _answer(
    bundle: LoadedBundle,
    asked: Sequence[tuple[int, Asked]],
    case: Case,
    params: SamplingParams,
    widths: WidthPolicy | None,
    new_recorder: NewRecorder,
) -> tuple[dict[int, Answered], Times]:
    """Answers the prompts, `case.batch` at a time, as `graphspec generate` does: no overlap, nothing kept."""
    recorder = new_recorder(bundle, case)
    policy = Policy(overlap=False, prompts_first=True, reuse_prefixes=False)
    loop = Loop(recorder, policy, widths=widths, clock=time.perf_counter)
    waiting = [_Waiting(bundle, each, number, case.width, params) for number, each in asked]
    for one in waiting:
        loop.add(one.row)
    while not loop.idle:
        loop.admit()
        loop.turn()
    recorder.close()
    return {one.number: one.answered() for one in waiting}, recorder.times


class _Waiting:
    """A request, and what came of it."""

    def __init__(self, bundle: LoadedBundle, asked: Asked, number: int, width: Width, params: SamplingParams) -> None:
        seeded = replace(params, seed=number)
        answer = new_answer(bundle.manifest, bundle.tokenizer, asked.ids, seeded, index=number)
        self.number = number
        self.row = Row(answer=answer, on_news=self._take, width=width)
        self._generation: Generation | None = None
        self._ended = 0.0
        self._error: GraphspecError | None = None

    def answered(self) -> Answered:
        """Raises what ended it, if that was an error."""
        if self._error is not None:
            raise self._error
        assert self._generation is not None, "the loop is idle when every answer has ended"
        return Answered(
            token_ids=self._generation.token_ids,
            acceptance=self._generation.acceptance,
            first=self.row.first - self.row.placed,
            rest=self._ended - self.row.first,
        )

    def _take(self, news: Piece | GraphspecError) -> None:
        if isinstance(news, GraphspecError):
            self._error = news
        elif news.generation is not None:
            self._generation, self._ended = news.generation, time.perf_counter()


def _token_ids(bundle: LoadedBundle, text: str) -> list[int]:
    if bundle.tokenizer.chat_template is None:
        return bundle.encode(text)
    return bundle.encode(bundle.chat([{"role": "user", "content": text}]), add_special_tokens=False)


def _prefill(engine: Engine, slot: int, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), PREFILL_CHUNK):
        end = start + PREFILL_CHUNK
        following = ids[end] if end < len(ids) else NO_TOKEN
        engine.prefill(Chunk(slot=slot, tokens=tuple(ids[start:end]), next_token=following)).result()
