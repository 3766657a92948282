"""Figures out of samples, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rounds import MOST_IDLE, Result, Sample

CHAT = "chat"
MOST_OTHERS = 0.02
"""Share of the cores that other work may have had in figures worth quoting."""
AS_PRECISE = 1.01
"""A peer counts as no less precise than ours if its perplexity is at most this many times ours."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of each round: their median, least and most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.least:.1f}-{self.most:.1f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender on some prompts."""

    name: str
    ours: bool
    speculates: bool
    decode: Spread
    """Tokens a second from the first one on."""
    whole: Spread
    """Tokens a second, the prompt's time included."""
    first_ms: float
    """Median of all answers."""
    tokens: float
    """Of an answer, the mean."""
    per_step: float | None
    """Tokens a step; None: not told."""
    step_ms: float | None
    device_ms: float | None
    """Of a step; ours alone tells."""
    perplexity: Mapping[str, float]

    @property
    def token_ms(self) -> float:
        """Of one token after the first."""
        return 1e3 / self.decode.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """What a row is made of."""

    name: str
    ours: bool
    speculates: bool
    result: Result
    perplexity: Mapping[str, float]


def row(entrant: Entrant, category: str | None = None) -> Row | None:
    """Its figures on the prompts of a category (None: all); None if it has not answered all of them."""
    samples = [each for each in entrant.result.samples if category in (None, each.category)]
    if entrant.result.failure or not samples:
        return None
    later = sum(len(each.tokens) - each.first_tokens for each in samples)
    seconds = sum(each.seconds - each.first_seconds for each in samples)
    steps, device = _total(samples, "steps"), _total(samples, "device_seconds")
    return Row(
        name=entrant.name,
        ours=entrant.ours,
        speculates=entrant.speculates,
        decode=_by_round(samples, lambda s: len(s.tokens) - s.first_tokens, lambda s: s.seconds - s.first_seconds),
        whole=_by_round(samples, lambda s: len(s.tokens), lambda s: s.seconds),
        first_ms=statistics.median(each.first_seconds for each in samples) * 1e3,
        tokens=statistics.mean(len(each.tokens) for each in samples),
        per_step=later / steps if steps else None,
        step_ms=seconds / steps * 1e3 if steps else None,
        device_ms=device / steps * 1e3 if steps and device else None,
        perplexity=entrant.perplexity,
    )


def table(entrants: Sequence[Entrant], category: str | None = None) -> str:
    """Markdown: the fastest first, then those without figures and why."""
    rows = sorted(filter(None, (row(each, category) for each in entrants)), key=lambda each: -each.decode.median)
    lines = [
        "| contender | decode tok/s | whole tok/s | ms/token | tok/step | ms/step | first ms | tokens | "
        "perplexity: prose | answers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        name = f"**{each.name}**" if each.ours else each.name
        figures = [str(each.decode), str(each.whole), f"{each.token_ms:.1f}", _or_dash(each.per_step, 2)]
        figures += [_or_dash(each.step_ms, 1), f"{each.first_ms:.0f}", f"{each.tokens:.0f}"]
        figures += [_or_dash(each.perplexity.get(kind), 2) for kind in ("prose", "answers")]
        lines.append(f"| {' | '.join([name, *figures])} |")
    return "\n".join(lines)


def by_category(entrants: Sequence[Entrant]) -> str:
    """Markdown: decode tokens a second of each category, and of all."""
    seen = dict.fromkeys(sample.category for each in entrants for sample in each.result.samples)
    lines = [f"| decode tok/s | {' | '.join([*seen, 'all'])} |", "|---" * (len(seen) + 2) + "|"]
    for each in entrants:
        if all_of_them := row(each):
            rows = [*(row(each, category) for category in seen), all_of_them]
            lines.append(f"| {each.name} | {' | '.join(_or_dash(r.decode.median if r else None, 1) for r in rows)} |")
    return "\n".join(lines)


def notes(entrants: Sequence[Entrant], others_share: float) -> list[str]:
    """What went wrong, and what makes figures worthless."""
    found = [f"{each.name} has no figures: {each.result.failure}" for each in entrants if each.result.failure]
    found += [
        f"{each.name} used {each.result.idle_share:.0%} of a core while others worked: their figures suffered"
        for each in entrants
        if each.result.idle_share > MOST_IDLE
    ]
    found += [
        f"{each.name} did not give the same tokens in every round"
        for each in entrants
        if not each.result.failure and not _same_every_round(each.result.samples)
    ]
    if others_share > MOST_OTHERS:
        found.append(f"other work had {others_share:.0%} of the cores: these figures are not results")
    return found


def goals(entrants: Sequence[Entrant]) -> list[str]:
    """How our fastest stands to the fastest peer: at all, without speculation, and among peers as precise as ours."""
    category = CHAT if any(s.category == CHAT for each in entrants for s in each.result.samples) else None
    rows = [found for each in entrants if (found := row(each, category))]
    where = f"on {category}" if category else "on these prompts"
    plain = [each for each in rows if not each.speculates]
    return [
        *_goal(f"{where}", rows, 2.0),
        *_goal(f"{where}, speculation off", plain, 1.3),
        *_goal(f"{where}, among peers no less precise", _as_precise(rows), 2.0),
    ]


def _goal(where: str, rows: Collection[Row], goal: float) -> list[str]:
    ours = max((each for each in rows if each.ours), key=lambda each: each.decode.median, default=None)
    peer = max((each for each in rows if not each.ours), key=lambda each: each.decode.median, default=None)
    if ours is None or peer is None:
        return []
    ratio = ours.decode.median / peer.decode.median
    said = f"{where}: {ours.name} is {ratio:.2f} times {peer.name}"
    if ratio >= goal:
        return [f"{said}; the goal of {goal:g} is met"]
    needed = peer.token_ms / goal
    too_many = f"{ours.token_ms:.1f} ms a token, {needed:.1f} needed: {ours.token_ms - needed:.1f} too many"
    return [f"{said}; the goal is {goal:g}. {too_many}{_where_they_are(ours)}"]


def _where_they_are(ours: Row) -> str:
    if ours.step_ms is None or ours.per_step is None:
        return ""
    said = f"; a step is {ours.step_ms:.1f} ms and gives {ours.per_step:.2f} tokens"
    if ours.device_ms is None:
        return said
    return f"{said}, of which {ours.device_ms:.1f} ms are the graph and {ours.step_ms - ours.device_ms:.1f} ms Python"


def _as_precise(rows: Sequence[Row]) -> list[Row]:
    """Our fastest, and the peers whose perplexity (of all kinds of text, the geometric mean) is at most AS_PRECISE
    times its own."""
    ours = max((each for each in rows if each.ours), key=lambda each: each.decode.median, default=None)
    if ours is None or not ours.perplexity:
        return []
    most = _overall(ours) * AS_PRECISE
    return [ours, *(each for each in rows if not each.ours and each.perplexity and _overall(each) <= most)]


def _overall(one: Row) -> float:
    return statistics.geometric_mean(one.perplexity.values())


def _by_round(samples: Sequence[Sample], tokens: Callable[[Sample], int], seconds: Callable[[Sample], float]) -> Spread:
    rates = []
    for number in sorted({each.round for each in samples}):
        of_round = [each for each in samples if each.round == number]
        rates.append(sum(map(tokens, of_round)) / max(sum(map(seconds, of_round)), 1e-9))
    return Spread(statistics.median(rates), min(rates), max(rates))


def _total(samples: Sequence[Sample], name: str) -> float:
    """Of something that every answer tells; else 0."""
    values: list[Any] = [each.more.get(name) for each in samples]
    return 0.0 if None in values else float(sum(values))


def _same_every_round(samples: Sequence[Sample]) -> bool:
    answers: dict[str, set[tuple[int, ...]]] = {}
    for each in samples:
        answers.setdefault(each.prompt, set()).add(each.tokens)
    return all(len(each) == 1 for each in answers.values())


def _or_dash(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
