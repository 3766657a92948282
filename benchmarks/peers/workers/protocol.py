"""What every contender speaks: one JSON object a line, a request on stdin and its answer on stdout.

    (at the start)                                            {"about": {"version": …, "settings": …}}
    {"generate": {"ids": […], "max_new_tokens": 200, "eos": [2]}}
                        {"tokens": […], "seconds": 1.9, "first_seconds": 0.1, "first_tokens": 1, "steps": …}
    {"score": {"ids": […]}}                                   {"logprobs": […]}      one for each id but the first

Standard library and numpy only: it runs in each peer's own environment. A contender that raises ends; the last line of
its stderr is what is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TextIO


class Watch:
    """Notes when tokens came."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begun = clock, clock()
        self.tokens: list[int] = []
        self._first: tuple[float, int] | None = None
        """When, and how many at once."""

    def add(self, tokens: Iterable[int]) -> None:
        """Tokens that came just now."""
        self.tokens += tokens
        if self._first is None and self.tokens:
            self._first = self._clock() - self._begun, len(self.tokens)

    def answer(self, eos: frozenset[int]) -> dict[str, Any]:
        """The request is over now. What came behind an EOS in the same step is dropped."""
        seconds = self._clock() - self._begun
        if self._first is None:
            raise RuntimeError("no token came")
        ends = [place for place, token in enumerate(self.tokens) if token in eos]
        tokens = self.tokens[: ends[0] + 1] if ends else self.tokens
        first_seconds, first_tokens = self._first
        return {
            "tokens": tokens,
            "seconds": seconds,
            "first_seconds": first_seconds,
            "first_tokens": min(first_tokens, len(tokens)),
        }


class Peer(Protocol):
    """A loaded model."""

    @property
    def about(self) -> Mapping[str, str]:
        """Versions and settings."""

    def generate(self, ids: Sequence[int], max_new_tokens: int, eos: frozenset[int], watch: Watch) -> Mapping[str, Any]:
        """Greedy; the watch is told of every token. What it returns (steps, say) is added to the answer."""

    def score(self, ids: Sequence[int]) -> list[float]:
        """Natural logarithms of the probability of each id but the first, given those before it."""


def serve(load: Callable[[argparse.Namespace], Peer], argv: Sequence[str] | None = None) -> None:
    """Loads the peer and answers until stdin ends."""
    answers = _answers_alone_on_stdout()
    peer = load(_arguments(argv))
    _say(answers, {"about": dict(peer.about)})
    for line in sys.stdin:
        request = json.loads(line)
        if "score" in request:
            _say(answers, {"logprobs": peer.score(request["score"]["ids"])})
            continue
        asked = request["generate"]
        eos = frozenset(asked["eos"])
        watch = Watch()
        more = peer.generate(asked["ids"], asked["max_new_tokens"], eos, watch)
        _say(answers, watch.answer(eos) | dict(more))


def logprobs_of(logits: Any, ids: Sequence[int]) -> list[float]:
    """Logits [tokens, vocabulary], float32, of every place of ids → the log-probability of each id but the first."""
    import numpy as np

    rows = np.asarray(logits, np.float32)[: len(ids) - 1].astype(np.float64)
    most = rows.max(axis=1)
    total = most + np.log(np.exp(rows - most[:, None]).sum(axis=1))
    chosen: list[float] = (rows[np.arange(len(rows)), np.asarray(ids[1:])] - total).tolist()
    return chosen


def _answers_alone_on_stdout() -> TextIO:
    """What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--score", action="store_true", help="it will be asked for log-probabilities, not for text")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that prompt lookup drafts a step; 0: none")
    parser.add_argument("--ngram", type=int, default=2, help="tokens that it looks up")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp: weights stay as they lie in the file")
    parser.add_argument("--dtype", default="float32", help="transformers")
    parser.add_argument("--width", default="0", help="graphspec: drafts verified a step")
    return parser.parse_args(argv)
