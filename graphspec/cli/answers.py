"""What `graphspec generate` prints: text as it comes, JSON, and how it went."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from graphspec.runtime.acceptance import AcceptanceReport, AcceptanceStatistics
    from graphspec.runtime.answer import Generation, Piece


@dataclass(slots=True, kw_only=True)
class Answer:
    """One prompt's answer and its times, in seconds of time.monotonic."""

    started: float
    first_token: float | None = None
    first_count: int = 0
    """Tokens that came with the first piece, and so before the time that speed is measured over."""
    ended: float = 0.0
    generation: Generation | None = None

    def take(self, piece: Piece) -> None:
        """Notes when a piece came."""
        now = time.monotonic()
        if piece.token_ids and self.first_token is None:
            self.first_token, self.first_count = now, len(piece.token_ids)
        if piece.generation is not None:
            self.ended, self.generation = now, piece.generation

    @property
    def done(self) -> Generation:
        """The whole answer."""
        if self.generation is None:
            raise RuntimeError("this answer has not ended")
        return self.generation


class Usage(TypedDict):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(TypedDict):
    """Seconds, and tokens a second after the first; None where there were too few tokens to say."""

    load_seconds: float
    time_to_first_token: float | None
    generate_seconds: float
    tokens_per_second: float | None


class AnswerObject(TypedDict):
    """What --json prints for a prompt."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    usage: Usage
    seed: int
    acceptance: AcceptanceReport
    timing: Timing


class Writer:
    """Writes text to stdout in the order of the prompts; with several, each under its number."""

    def __init__(self, count: int) -> None:
        self._waiting = [""] * count
        self._finished = [False] * count
        self._current = 0
        self._open_line = False

    def take(self, piece: Piece) -> None:
        """The current answer's text goes out at once, that of later ones when their turn comes."""
        self._waiting[piece.index] += piece.text
        self._finished[piece.index] |= piece.generation is not None
        while self._current < len(self._waiting):
            index = self._current
            text, self._waiting[index] = self._waiting[index], ""
            self._write(text)
            if not self._finished[index]:
                return
            self.end()
            self._current += 1

    def end(self) -> None:
        """Ends the line that is open, if one is."""
        if self._open_line:
            print(flush=True)
            self._open_line = False

    def _write(self, text: str) -> None:
        if not self._open_line:
            self._open_line = True
            if len(self._waiting) > 1:
                print(f"[{self._current + 1}] ", end="")
        print(text, end="", flush=True)


def as_object(answer: Answer, load_seconds: float) -> AnswerObject:
    """One answer for --json."""
    generation = answer.done
    prompt, completion = generation.num_prompt_tokens, len(generation.token_ids)
    return AnswerObject(
        text=generation.text,
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        usage=Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion),
        seed=generation.seed,
        acceptance=generation.acceptance.to_json(),
        timing=Timing(
            load_seconds=round(load_seconds, 6),
            time_to_first_token=_first(answer),
            generate_seconds=round(answer.ended - answer.started, 6),
            tokens_per_second=_speed([answer]),
        ),
    )


def write_json(value: AnswerObject | list[AnswerObject]) -> None:
    """One line of ASCII on stdout."""
    print(json.dumps(value))


def totals(answers: Sequence[Answer], width: int) -> list[str]:
    """The run in lines: acceptance over all prompts, as MAX logs it, and speed."""
    statistics: AcceptanceStatistics = reduce(
        lambda total, answer: total.merge(answer.done.acceptance), answers[1:], answers[0].done.acceptance
    )
    count = sum(len(answer.done.token_ids) for answer in answers)
    first, speed = _first(answers[0]), _speed(answers)
    parts = [
        f"{count} tokens in {max(answer.ended for answer in answers) - answers[0].started:.2f} s",
        *([f"{speed:.1f} tokens/s after the first"] if speed is not None else []),
        *([f"TTFT {first:.3f} s"] if first is not None else []),
    ]
    return [*filter(None, [statistics.log_line(width)]), ", ".join(parts)]


def _first(answer: Answer) -> float | None:
    return None if answer.first_token is None else round(answer.first_token - answer.started, 6)


def _speed(answers: Sequence[Answer]) -> float | None:
    """Tokens a second of all answers, from the first token of any to the end of the last."""
    started = [answer.first_token for answer in answers if answer.first_token is not None]
    later = sum(len(answer.done.token_ids) - answer.first_count for answer in answers)
    seconds = max(answer.ended for answer in answers) - min(started) if started else 0.0
    return round(later / seconds, 3) if later and seconds > 0 else None
