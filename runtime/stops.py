"""Where a request ends: the first token, in the order they are committed, that a stop rule applies to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .sampling import SamplingParams
from .text import IncrementalDetokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends one request."""

    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    """This many tokens come before the first that may stop the request; until then EOS and stop tokens are
    tokens like any other (graphs that can mask them never produce one), and stop strings are plain text."""
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    """Only EOS is ignored; stop tokens and stop strings still hold."""
    include_stop_str_in_output: bool = False
    """For stop strings. The text of an EOS or stop token is never part of the output's text."""

    @classmethod
    def of(cls, params: SamplingParams, *, eos_token_ids: tuple[int, ...], room: int) -> "StopRules":
        """The rules of a request for which the cache has room for `room` more tokens."""
        asked = params.max_new_tokens
        return cls(
            eos_token_ids=eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
            min_tokens=params.min_tokens,
            max_new_tokens=room if asked is None else min(asked, room),
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Every token that stops the request."""
        return frozenset(self.stop_token_ids + (() if self.ignore_eos else self.eos_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a request ended."""

    num_tokens: int
    """Of the tokens pushed last, how many belong to the output: the last is the EOS or stop token, the one
    that completed a stop string, or the last one allowed. Token ids, logprobs and usage end with it."""
    reason: FinishReason
    matched: str | int | None
    """The stop string, or the EOS or stop token; for "length" None, or why it ended before its limit."""
    text_length: int
    """Characters of the output's text: it ends before an EOS or stop token, and before a stop string (or
    after it, where the rules include it)."""


class StopTracker:
    """Follows the committed tokens of one request and finds where it ends.

    How tokens are split over pushes changes nothing: each is looked at on its own.
    """

    def __init__(self, rules: StopRules, detokenizer: IncrementalDetokenizer) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._ending = rules.ending_token_ids
        self._num_checked = 0
        self._num_taken = 0
        self.num_tokens = 0
        """Tokens of the output so far."""
        self.text = ""
        """Text of the output so far, without what the next token could change; all of it after the cut."""
        self.text_ends = list[int]()
        """Length of the text when each token had come, before a stop string was cut from it."""
        self.cut: Cut | None = None
        if rules.max_new_tokens == 0:
            self.cut = Cut(num_tokens=0, reason="length", matched=None, text_length=0)

    def push(self, token_ids: Sequence[int]) -> Cut | None:
        """Takes the next committed tokens; the cut if the request ended with one of them.

        A request that has ended keeps none of them: its late tokens change nothing.
        """
        if self.cut is not None:
            return replace(self.cut, num_tokens=0)
        for count, token_id in enumerate(token_ids, start=1):
            ended = self._push(token_id)
            if ended is not None:
                reason, matched = ended
                length = len(self.text)
                self.cut = Cut(num_tokens=count, reason=reason, matched=matched, text_length=length)
                return self.cut
        return None

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the request, where the caller asked for it: a stop string or a stop token."""
        matched = None if self.cut is None else self.cut.matched
        return None if not self._rules.ignore_eos and matched in self._rules.eos_token_ids else matched

    def end(self, matched: str | None) -> None:
        """Ends the request with the tokens there are, for another reason than a rule; nothing, if it has ended."""
        if self.cut is None:
            self.text += self._detokenizer.finish()
            self.cut = Cut(num_tokens=0, reason="length", matched=matched, text_length=len(self.text))

    def take_text(self) -> str:
        """The text to stream now: no longer than what is certain to be output, and nothing twice."""
        certain = self.cut is not None or self._rules.include_stop_str_in_output
        end = len(self.text) if certain else safe_length(self.text, self._rules.stop)
        text = self.text[self._num_taken : end]
        self._num_taken = end
        return text

    def _push(self, token_id: int) -> tuple[FinishReason, str | int | None] | None:
        self.num_tokens += 1
        may_stop = self.num_tokens > self._rules.min_tokens
        if may_stop and token_id in self._ending:
            self._add(self._detokenizer.finish())
            return "stop", token_id
        self._add(self._detokenizer.push([token_id]))
        matched = self._match(may_stop) if self._rules.stop else None
        if matched is not None:
            return "stop", matched
        if self.num_tokens == self._rules.max_new_tokens:
            self.text += self._detokenizer.finish()
            self.text_ends[-1] = len(self.text)
            return "length", None
        return None

    def _add(self, text: str) -> None:
        """The text that a token decided."""
        self.text += text
        self.text_ends.append(len(self.text))

    def _match(self, may_stop: bool) -> str | None:
        """Cuts the text at the stop string that this token completed."""
        # A character that the next token could take back may complete a stop string: the answer ends here.
        text = self.text + self._detokenizer.undecided
        found = find_stop(text, self._rules.stop, self._num_checked) if may_stop else None
        self._num_checked = max(self._num_checked, len(text))
        if found is None:
            return None
        start, stop = found
        self.text = text[: start + len(stop) if self._rules.include_stop_str_in_output else start]
        return stop


def find_stop(text: str, stop: Sequence[str], num_checked: int = 0) -> tuple[int, str] | None:
    """The stop string that ends first behind `num_checked` characters, and where it starts.

    Of two that end together the longer one. So the answer is that of reading one character at a time,
    whatever the pieces the text came in.
    """
    starts = ((text.find(string, max(0, num_checked - len(string) + 1)), string) for string in stop)
    found = [(start, string) for start, string in starts if start >= 0]
    return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def safe_length(text: str, stop: Sequence[str]) -> int:
    """Characters of `text` that no stop string still to be completed can take away."""
    parts = (string[:size] for string in stop for size in range(1, len(string)))
    return len(text) - max((len(part) for part in parts if text.endswith(part)), default=0)
