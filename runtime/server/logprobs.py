"""How log-probabilities are written: as text completions list them, and as chats do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..logprobs import TokenLogprob
from ..text import IncrementalDetokenizer, Tokenizer

LOWEST = -9999.0
"""What is written for less: JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token of a choice."""

    token_id: int
    offset: int
    """Characters of the choice's text before it."""
    score: TokenLogprob | None
    """None for the first token of a prompt."""


class TokenNames:
    """What tokens are called in a response."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """`as_ids`: token_id:5, as clients ask for that must tell all tokens apart."""
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def text(self, token_id: int) -> str:
        """The token's text, with U+FFFD for what is no character by itself."""
        return _as_id(token_id) if self._as_ids else self.content(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """The token's text; OpenAI's name for the bytes of one that is no text by itself."""
        if self._as_ids:
            return _as_id(token_id)
        content = self.content(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def content(self, token_id: int) -> bytes:
        """The token's part of the text."""
        return self._tokenizer.token_bytes(token_id)


def completion_logprobs(tokens: Sequence[ScoredToken], names: TokenNames) -> dict[str, Any]:
    """Of a text completion: four lists of one length."""
    return {
        "tokens": [names.key(token.token_id) for token in tokens],
        "token_logprobs": [None if token.score is None else _value(token.score.logprob) for token in tokens],
        "top_logprobs": [None if token.score is None else _by_key(token.score, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken], names: TokenNames) -> dict[str, Any]:
    """Of a chat's answer."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names.text(token_id),
            "logprob": _value(logprob),
            "bytes": list(names.content(token_id)),
        }

    scores = [token.score for token in tokens if token.score is not None]
    content = [
        entry(score.token_id, score.logprob) | {"top_logprobs": [entry(*best) for best in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Characters of the text of all tokens that stand before each."""
    detokenizer, offsets, end = IncrementalDetokenizer(tokenizer), list[int](), 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.push([token_id]))
    return tuple(offsets)


def _by_key(score: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The most probable tokens and the one that is there. Two of one text are both there: clients look for the
    largest number."""
    found = dict[str, float]()
    for token_id, logprob in {**dict(score.top), score.token_id: score.logprob}.items():
        key = names.key(token_id)
        found[_as_id(token_id) if key in found else key] = _value(logprob)
    return found


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _value(logprob: float) -> float:
    return max(logprob, LOWEST)
