"""One request on its way: what was committed, where it ends, what of it may be streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphspec.backends import BACKENDS
from graphspec.errors import RequestError
from graphspec.manifest import Manifest

from .acceptance import AcceptanceStatistics
from .engine import NO_TOKEN, Chunk
from .logprobs import Logits, TokenLogprob, token_logprobs
from .sampling import SamplingParams, fresh_seed
from .stops import FinishReason, StopRules, StopTracker
from .text import IncrementalDetokenizer, Tokenizer

_MOST_LOGITS = 64
"""Prompt tokens in a chunk that gives logits: megabytes for each would be hundreds for a chunk of the usual size."""


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
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of token_ids; None: not asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt, None for the first; None: not asked for."""


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
    text_ends: tuple[int, ...] = ()
    """Length of the answer's text, in characters, when each of them had come (as in Generation)."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of token_ids; None: not asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """The first piece has all of them, where they were asked for."""
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
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    _num_streamed: int = 0
    _streaming: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing is added any more."""
        return self.tracker.cut is not None and not (self.reads_prompt and self._unread)

    @property
    def reads_prompt(self) -> bool:
        """Whether every token of the prompt must be run, for its logits."""
        return self.params.prompt_logprobs is not None

    @property
    def reusable(self) -> tuple[int, ...]:
        """The tokens of the prompt that need not be run where a cache has them."""
        return () if self.reads_prompt else self.prompt

    @property
    def wants_logits(self) -> bool:
        """Of steps."""
        return self.params.logprobs is not None

    @property
    def _unread(self) -> tuple[int, ...]:
        """Prompt tokens whose probability is not known yet."""
        return self.prompt[len(self.prompt_logprobs) :]

    def chunks(self, slot: int, size: int, *, num_drafts: int | None = None) -> Iterator[Chunk]:
        """What of the prompt is not in the cache, in chunks; the last one commits the first token, and drafts
        `num_drafts` more (None: K)."""
        if self.reads_prompt:
            size = min(size, _MOST_LOGITS)
        for start in range(self.num_cached_tokens, len(self.prompt), size):
            end = start + size
            following = self.prompt[end] if end < len(self.prompt) else NO_TOKEN
            tokens = self.prompt[start:end]
            num_logits = len(tokens) if self.reads_prompt else int(self.wants_logits and following == NO_TOKEN)
            yield Chunk(slot=slot, tokens=tokens, next_token=following, num_logits=num_logits, num_drafts=num_drafts)

    def read_prompt(self, logits: Logits | None) -> Logits | None:
        """Takes from a chunk's logits f32[R, V] what they say of the prompt's tokens → the rows left."""
        if logits is None or not self.reads_prompt:
            return logits
        found = token_logprobs(logits, self._unread, self.params.prompt_logprobs or 0)
        self.prompt_logprobs += found
        return logits[len(found) :]

    def commit(
        self, tokens: Sequence[int], *, accepted: int = 0, width: int = 0, logits: Logits | None = None
    ) -> list[Piece]:
        """Adds what a step committed, having accepted that many of `width` drafts → the piece to stream now, or
        none. Tokens after the end of the answer change nothing, statistics included. `logits`: as the step gave
        them, f32[R, V]; needed where log-probabilities are wanted."""
        after_prompt = self.read_prompt(logits)
        cut = self.tracker.push(tokens)
        new = tokens if cut is None else tokens[: cut.num_tokens]
        self.token_ids += new
        if self.params.logprobs is not None and after_prompt is not None:
            self.logprobs += token_logprobs(after_prompt, new, self.params.logprobs)
        if width:
            self.acceptance.add(min(accepted, len(new)), width, committed=len(new))
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
                logprobs=tuple(self.logprobs) if self.wants_logits else None,
                prompt_logprobs=tuple(self.prompt_logprobs) if self.reads_prompt else None,
            )
        new = slice(self._num_streamed, None)
        first, self._streaming = not self._streaming, True
        self._num_streamed = len(self.token_ids)
        return [
            Piece(
                index=self.index,
                text=text,
                token_ids=tuple(self.token_ids[new]),
                text_ends=tuple(self.tracker.text_ends[new]),
                logprobs=tuple(self.logprobs[new]) if self.wants_logits else None,
                prompt_logprobs=tuple(self.prompt_logprobs) if first and self.reads_prompt else None,
                generation=generation,
            )
        ]


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
    asked = "logprobs" if params.logprobs is not None else "prompt_logprobs"
    if "logprobs" not in manifest.capabilities and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise RequestError(f"{asked} cannot be given: {_why_no_logprobs(manifest)}")


def _why_no_logprobs(manifest: Manifest) -> str:
    backend = BACKENDS[manifest.backend.name]
    if "logprobs" in backend.lacks:
        return f"engines of {backend.name} keep logits on the device; leave it out, or build for onnxruntime"
    return (
        "the bundle was built by a graphspec whose graphs have no logits, or for an architecture that declares no "
        "logprobs; leave it out, or build it again"
    )
