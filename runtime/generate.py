"""Text from a bundle, without a server: `graphspec.load(bundle).generate(...)`.

Prompts share the engine's slots: as one request ends, the next takes its row.
"""

from __future__ import annotations

import os
import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from graphspec.bundle import Bundle
from graphspec.errors import ConfigError, RequestError
from graphspec.manifest import Manifest

from .acceptance import AcceptanceStatistics
from .chat import render_chat
from .engine import NO_TOKEN, Chunk, Engine, StepResult
from .loading import open_engine
from .requests import check_count, checked_params, checked_prompts
from .sampling import SamplingParams, fresh_seed, uniform_table
from .stops import FinishReason, StopRules, StopTracker
from .text import IncrementalDetokenizer, Tokenizer

PREFILL_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    """Generated tokens, an ending EOS or stop token included."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    seed: int
    acceptance: AcceptanceStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What was added to one answer; the last piece of an answer carries it whole.

    Only that one may have no text: tokens whose text is not decided yet (half a character, the start of what may
    be a stop string) come with the piece that their text is in.
    """

    index: int
    """Which prompt."""
    text: str
    token_ids: tuple[int, ...]
    """All that came since the piece before."""
    generation: Generation | None = None


@dataclass(slots=True, kw_only=True)
class _Request:
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    tracker: StopTracker
    token_ids: list[int] = field(default_factory=list)
    num_streamed: int = 0
    """How many of them are in pieces."""
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)


class _Slots:
    """Which rows of the engine are free: generations in several threads, or interleaved, share them."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._lock = Lock()

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int | None:
        """The lowest free slot (a step runs the range of slots that holds its rows); None: all are taken."""
        with self._lock:
            slot = min(self._free, default=None)
            if slot is not None:
                self._free.remove(slot)
            return slot

    def give_back(self, slots: Iterable[int]) -> None:
        with self._lock:
            self._free.update(slots)


class LoadedBundle:
    """A bundle ready to generate. Use as a context manager, or call `close`."""

    def __init__(self, bundle: Bundle, engine: Engine, tokenizer: Tokenizer) -> None:
        self._bundle, self._engine = bundle, engine
        self._slots = _Slots(engine.num_slots)
        self._closed = False
        self.tokenizer = tokenizer

    @property
    def manifest(self) -> Manifest:
        """What the bundle was built from and for."""
        return self._bundle.manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the engine. What is asked afterwards, and pieces still to come, are a RequestError."""
        self._closed = True
        self._engine.close()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        width: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> list[Generation]:
        """One answer for each prompt, a text or token ids; everything else as `stream`."""
        generations: dict[int, Generation] = {}
        for piece in self.stream(prompts, params, width=width, prefill_chunk=prefill_chunk):
            if piece.generation is not None:
                generations[piece.index] = piece.generation
        return [generations[index] for index in range(len(generations))]

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        width: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Iterator[Piece]:
        """Pieces of the answers as steps commit them.

        `params` holds for every prompt, or is one for each. `width`: drafts verified a step; None: the widest of
        the bundle; 0: no speculation. Raises RequestError before anything is generated.
        """
        self._check_open()
        asked = checked_prompts(prompts)
        each = checked_params(params, len(asked))
        verified = self._checked_width(width)
        check_count("prefill_chunk", prefill_chunk)
        requests = [self._request(i, p, s) for i, (p, s) in enumerate(zip(asked, each, strict=True))]
        return self._run(requests, verified, prefill_chunk)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the model's chat template makes of messages. Raises RequestError."""
        tokenizer = self.tokenizer
        return render_chat(
            tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a chat prompt names its special tokens itself. Raises RequestError."""
        if not isinstance(text, str):
            raise RequestError(f"the text is {reprlib.repr(text)}: it must be a string")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this bundle is closed: load it again, and close it when all answers are there")

    def _checked_width(self, width: int | None) -> int:
        widths = self.manifest.widths
        if width is None:
            return widths[-1]
        if isinstance(width, bool) or not isinstance(width, int) or width not in widths:
            known = ", ".join(map(str, widths))
            raise RequestError(f"width {reprlib.repr(width)} is not in this bundle; it was built for {known}")
        return width

    def _request(self, index: int, prompt: str | tuple[int, ...], params: SamplingParams) -> _Request:
        ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else prompt
        limit, vocabulary = self.manifest.max_length, self.manifest.pair.target.vocab_size
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        if wrong := [token for token in ids if not 0 <= token < vocabulary]:
            raise RequestError(f"the prompt holds token {wrong[0]}; the vocabulary has tokens 0 to {vocabulary - 1}")
        if wrong := [token for token in params.stop_token_ids if token >= vocabulary]:
            raise RequestError(
                f"stop_token_ids holds {wrong[0]}, which never comes: the vocabulary has tokens 0 to {vocabulary - 1}"
            )
        if len(ids) >= limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the bundle holds {limit} for prompt and answer together; "
                "shorten it, or build with a larger --max-length"
            )
        if "greedy" in self.manifest.variants and not params.greedy:
            raise RequestError(
                f"temperature is {params.temperature} and the bundle was built with --use-greedy-acceptance; "
                "use temperature 0, or build without it"
            )
        rules = StopRules.of(params, eos_token_ids=self.manifest.eos_token_ids, room=limit - len(ids))
        detokenizer = IncrementalDetokenizer(self.tokenizer, prompt=ids)
        return _Request(
            index=index,
            prompt=ids,
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            tracker=StopTracker(rules, detokenizer),
        )

    def _run(self, requests: Sequence[_Request], width: int, prefill_chunk: int) -> Iterator[Piece]:
        waiting, running = deque(requests), dict[int, _Request]()
        try:
            while waiting or running:
                # One at a time: what is taken is in `running`, so that any way out of here gives it back.
                while waiting and (slot := self._slots.take()) is not None:
                    request = running[slot] = waiting.popleft()
                    self._check_open()
                    if request.tracker.cut is None:
                        yield from self._take(request, self._prefill(slot, request, prefill_chunk).tokens(0))
                    else:  # max_new_tokens 0
                        yield from self._take(request, [])
                self._release_finished(running)
                if running:
                    self._check_open()
                    result = self._engine.step(sorted(running), width).result()
                    yield from self._take_step(running, result, width)
                    self._release_finished(running)
                elif waiting and not self._slots.any_free:
                    raise RequestError("another generation in progress holds every row of this bundle; finish it first")
        finally:  # also when the caller drops the iterator in the middle
            self._slots.give_back(running)

    def _prefill(self, slot: int, request: _Request, size: int) -> StepResult:
        """Runs the whole prompt; the last chunk commits the first token."""
        table = uniform_table(request.seed, self._engine.capacity)
        self._engine.admit(slot, request.params, table)
        prompt = request.prompt
        for start in range(0, len(prompt), size):
            after = start + size
            following = prompt[after] if after < len(prompt) else NO_TOKEN
            pending = self._engine.prefill(Chunk(slot=slot, tokens=prompt[start:after], next_token=following))
        return pending.result()

    def _take_step(self, running: Mapping[int, _Request], result: StepResult, width: int) -> Iterator[Piece]:
        for row, slot in enumerate(result.slots):
            request, tokens = running[slot], result.tokens(row)
            before = len(request.token_ids)
            pieces = self._take(request, tokens)
            if width:
                kept = len(request.token_ids) - before
                accepted = min(int(result.accepted[row]), kept)
                request.acceptance.add(accepted, width, committed=kept)
            yield from pieces

    def _take(self, request: _Request, tokens: Sequence[int]) -> list[Piece]:
        """Commits the tokens → the piece to stream now, or none."""
        cut = request.tracker.cut or request.tracker.push(tokens)
        request.token_ids += tokens if cut is None else tokens[: cut.num_tokens]
        text = request.tracker.take_text()
        if not text and cut is None:
            return []
        generation = None
        if cut is not None:
            generation = Generation(
                text=request.tracker.text,
                token_ids=tuple(request.token_ids),
                finish_reason=cut.reason,
                num_prompt_tokens=len(request.prompt),
                seed=request.seed,
                acceptance=request.acceptance,
            )
        token_ids = tuple(request.token_ids[request.num_streamed :])
        request.num_streamed = len(request.token_ids)
        return [Piece(index=request.index, text=text, token_ids=token_ids, generation=generation)]

    def _release_finished(self, running: dict[int, _Request]) -> None:
        finished = [slot for slot, request in running.items() if request.tracker.cut is not None]
        for slot in finished:
            del running[slot]
        self._slots.give_back(finished)


def load(
    bundle: str | Path, *, max_batch_size: int | None = None, num_threads: int | None = None, verify: bool = True
) -> LoadedBundle:
    """Opens a bundle: hashes and backend are checked before a byte reaches the backend. Raises BundleError, and
    ConfigError for settings that the bundle or this machine cannot honour."""
    if not isinstance(bundle, str | os.PathLike):
        raise ConfigError(f"the bundle is {reprlib.repr(bundle)}: it must be a path")
    for name, value in (("max_batch_size", max_batch_size), ("num_threads", num_threads)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{name} is {reprlib.repr(value)}: it must be an integer, or None")
    opened, engine = open_engine(Path(bundle), num_slots=max_batch_size, num_threads=num_threads, verify=verify)
    tokenizer = Tokenizer.load(opened.root)
    opened.confirm()  # a rebuild while it loaded would have mixed two bundles
    return LoadedBundle(opened, engine, tokenizer)
