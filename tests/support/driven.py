"""A loop on a virtual device, turned by the test: nothing happens but what it says, and always in the same order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tokenizers
from virtual_device import VOCABULARY, Clock, VirtualDevice, continuation

from graphspec.errors import GraphspecError
from graphspec.runtime.answer import Answer, Generation, Piece
from graphspec.runtime.loop import Loop, Policy
from graphspec.runtime.rows import BatchReport, RequestReport, Row
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.stops import StopRules, StopTracker
from graphspec.runtime.text import IncrementalDetokenizer, Tokenizer
from graphspec.runtime.width_policy import Width, WidthPolicy

EOS = 63


@cache
def tokenizer() -> Tokenizer:
    """One character for each token."""
    words = {chr(ord("0") + token): token for token in range(VOCABULARY)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    raw.decoder = tokenizers.decoders.Fuse()
    return Tokenizer({"tokenizer.json": raw.to_str().encode()})


def text_of(tokens: Sequence[int]) -> str:
    """Without what special tokens there might be: there are none."""
    return "".join(chr(ord("0") + token) for token in tokens)


@dataclass(eq=False)
class Asked:
    """A request, and what its caller was told."""

    prompt: tuple[int, ...]
    params: SamplingParams
    row: Row
    pieces: list[Piece] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of the pieces."""
    error: GraphspecError | None = None
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        return self.error is not None or bool(self.pieces and self.pieces[-1].generation)

    @property
    def generation(self) -> Generation:
        assert self.error is None
        last = self.pieces[-1].generation
        assert last is not None
        assert "".join(piece.text for piece in self.pieces) == last.text
        assert [token for piece in self.pieces for token in piece.token_ids] == list(last.token_ids)
        return last


@dataclass
class Driven:
    """Requests come when the test adds them; `host_time` is what a piece costs the thread that takes the turns."""

    device: VirtualDevice = field(default_factory=VirtualDevice)
    policy: Policy = field(default_factory=Policy)
    host_time: float = 0.0
    max_length: int = 200
    widths: WidthPolicy | None = None
    batches: list[BatchReport] = field(default_factory=list)
    answers: list[RequestReport] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = Loop(
            self.device,
            self.policy,
            widths=self.widths,
            on_batch=self.batches.append,
            on_answer=self.answers.append,
            on_failure=self.failures.append,
            clock=self.clock,
        )

    @property
    def clock(self) -> Clock:
        return self.device.clock

    def ask(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        *,
        width: Width | None = None,
        chunk_size: int = 8,
        client: Hashable = None,
        deadline: float | None = None,
        **params: Any,
    ) -> Asked:
        """Adds a request; sampled, with seed 0 unless it says otherwise."""
        sampling = SamplingParams(**{"temperature": 1.0, "seed": 0, **params})
        room = self.max_length - len(prompt)
        rules = StopRules.of(sampling, eos_token_ids=(EOS,), room=room)
        answer = Answer(
            index=len(self.asked),
            prompt=tuple(prompt),
            params=sampling,
            seed=sampling.seed or 0,
            tracker=StopTracker(rules, IncrementalDetokenizer(tokenizer(), prompt=tuple(prompt))),
            limit=rules.max_new_tokens or 0,
        )

        def told(news: Piece | GraphspecError) -> None:
            assert not asked.ended, "nothing comes after the end"
            assert not asked.cancelled, "nothing comes after it was cancelled"
            self.clock.now += self.host_time
            if isinstance(news, GraphspecError):
                asked.error = news
            else:
                asked.pieces.append(news)
                asked.times.append(self.clock.now)

        row = Row(
            answer=answer,
            on_news=told,
            width=self.device.num_drafts if width is None else width,
            chunk_size=chunk_size,
            client=object() if client is None else client,
            deadline=deadline,
        )
        asked = Asked(tuple(prompt), sampling, row)
        self.asked.append(asked)
        self.loop.add(row)
        return asked

    def cancel(self, asked: Asked) -> None:
        asked.cancelled = True
        self.loop.drop(asked.row)

    def turn(self) -> None:
        self.loop.admit()
        self.loop.turn()

    def run(self, turns: int = 10_000) -> Driven:
        """Until nothing is left to do, or for so many turns."""
        for _ in range(turns):
            if self.loop.idle:
                return self
            self.turn()
        assert turns < 10_000, "it does not end"
        return self


def expected(asked: Asked, *, room: int) -> tuple[list[int], str]:
    """Token ids and finish reason by the rules' own words: no stop strings, no minimum."""
    params = asked.params
    limit = min(room, room if params.max_new_tokens is None else params.max_new_tokens)
    tokens = continuation(asked.prompt, params.seed or 0, limit)
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for count, token in enumerate(tokens, start=1):
        if token in ending:
            return tokens[:count], "stop"
    return tokens, "length"
