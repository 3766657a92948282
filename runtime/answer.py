"""One request on its way: what was committed, where it ends, what of it may be streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphspec.errors import RequestError
from graphspec.manifest import Manifest

from .acceptance import AcceptanceStatistics
from .engine import NO_TOKEN, Chunk
from .sampling import SamplingParams, fresh_seed
from .stops import FinishReason, StopRules, StopTracker
from .text import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    """Generated tokens, an ending EOS or stop token included."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for EOS, and for "length", but "timeout" at a deadline."""
    text_ends: tuple[int, ...] = ()
    """Length of the text, in characters, when each token had come; a stop string still to be cut counts."""
    num_prompt_tokens: int
    seed: int
    acceptance: AcceptanceStatistics
    num_cached_tokens: int = 0
    """Prompt tokens that an earlier request left in the cache."""


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
class Answer:
    """The state of one request, from its prompt to its last piece."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    tracker: StopTracker
    limit: int
    """Tokens the answer can have at most."""
    token_ids: list[int] = field(default_factory=list)
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    num_cached_tokens: int = 0
    _num_streamed: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing is added any more."""
        return self.tracker.cut is not None

    def chunks(self, slot: int, size: int) -> Iterator[Chunk]:
        """What of the prompt is not in the cache, in chunks; the last one commits the first token."""
        for start in range(self.num_cached_tokens, len(self.prompt), size):
            end = start + size
            following = self.prompt[end] if end < len(self.prompt) else NO_TOKEN
            yield Chunk(slot=slot, tokens=self.prompt[start:end], next_token=following)

    def commit(self, tokens: Sequence[int], *, accepted: int = 0, width: int = 0) -> list[Piece]:
        """Adds what a step committed, having accepted that many of `width` drafts → the piece to stream now, or
        none. Tokens after the end of the answer change nothing, statistics included."""
        before = len(self.token_ids)
        cut = self.tracker.cut or self.tracker.push(tokens)
        self.token_ids += tokens if cut is None else tokens[: cut.num_tokens]
        if width:
            kept = len(self.token_ids) - before
            self.acceptance.add(min(accepted, kept), width, committed=kept)
        return self._piece()

    def end(self, matched: str | None = None) -> list[Piece]:
        """Ends it here, of length → the last piece. `matched`: why, if not for max_new_tokens 0."""
        self.tracker.end(matched)
        return self._piece()

    def _piece(self) -> list[Piece]:
        cut, num_new = self.tracker.cut, len(self.token_ids) - self._num_streamed
        if cut is None and self._num_streamed and num_new < self.params.stream_interval:
            return []
        text = self.tracker.take_text()
        if not text and cut is None:
            return []
        generation = None
        if cut is not None:
            generation = Generation(
                text=self.tracker.text,
                token_ids=tuple(self.token_ids),
                finish_reason=cut.reason,
                stop_reason=self.tracker.stop_reason,
                text_ends=tuple(self.tracker.text_ends),
                num_prompt_tokens=len(self.prompt),
                seed=self.seed,
                acceptance=self.acceptance,
                num_cached_tokens=self.num_cached_tokens,
            )
        token_ids = tuple(self.token_ids[self._num_streamed :])
        self._num_streamed = len(self.token_ids)
        return [Piece(index=self.index, text=text, token_ids=token_ids, generation=generation)]


def new_answer(
    manifest: Manifest, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams, *, index: int = 0
) -> Answer:
    """Checks a request against the bundle. Raises RequestError."""
    ids = tuple(prompt)
    _check_request(manifest, ids, params)
    room = manifest.max_length - len(ids)
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        shown=params.shown_special_tokens,
        prompt=ids,
    )
    rules = StopRules.of(params, eos_token_ids=manifest.eos_token_ids, room=room)
    return Answer(
        index=index,
        prompt=ids,
        params=params,
        seed=fresh_seed() if params.seed is None else params.seed,
        tracker=StopTracker(rules, detokenizer),
        limit=room if params.max_new_tokens is None else min(room, params.max_new_tokens),
    )


def _check_request(manifest: Manifest, ids: tuple[int, ...], params: SamplingParams) -> None:
    limit, vocabulary = manifest.max_length, manifest.pair.target.vocab_size
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
    if "greedy" in manifest.variants and not params.greedy:
        raise RequestError(
            f"temperature is {params.temperature} and the bundle was built with --use-greedy-acceptance; "
            "use temperature 0, or build without it"
        )
