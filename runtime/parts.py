"""What an answer's text is made of: content, reasoning between <think> and </think>, calls of tools.

Parsers take text as it is streamed and give parts as soon as they are certain; how the text was cut changes nothing
but where the parts are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

THINK, END_OF_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's own thinking."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, whole."""

    name: str
    arguments: str
    """A JSON object."""


Part = Content | Reasoning | ToolCall


class Parser(Protocol):
    """Text in pieces → parts."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with this piece."""
        ...

    def finish(self) -> list[Part]:
        """The rest: the text has ended."""
        ...


class PlainParser:
    """Everything is content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class ReasoningParser:
    """Splits off what stands between <think> and </think>; the content around it goes to another parser."""

    def __init__(self, content: Parser, *, thinking: bool = False) -> None:
        """`thinking`: the prompt ended with <think>, as some chat templates' do."""
        self._content, self._thinking = content, thinking
        self._held = ""
        self._num_pushed = self._opened = 0
        self.spans = list[tuple[int, int]]()
        """Where the reasoning stands in the text, without its tags."""
        self._trim = thinking
        """Whether white space at the start of what comes belongs to the tag before it."""

    def push(self, text: str) -> list[Part]:
        self._held += text
        self._num_pushed += len(text)
        parts: list[Part] = []
        while True:
            tag = END_OF_THINK if self._thinking else THINK
            place = self._held.find(tag)
            if place < 0:
                certain = len(self._held) - possible_start(self._held, (tag,))
                return parts + self._take(certain)
            self._cross(self._num_pushed - len(self._held) + place, len(tag))
            # White space before the closing tag belongs to it.
            parts += self._take(place, closing=self._thinking)
            self._held = self._held[len(tag) :]
            self._thinking = not self._thinking
            self._trim = True

    def finish(self) -> list[Part]:
        if self._thinking:
            self.spans.append((self._opened, self._num_pushed))
        return self._take(len(self._held), closing=True) + self._content.finish()

    def _cross(self, place: int, length: int) -> None:
        """A tag is at that place of the text."""
        if self._thinking:
            self.spans.append((self._opened, place))
        self._opened = place + length

    def _take(self, length: int, *, closing: bool = False) -> list[Part]:
        text, rest = self._held[:length], self._held[length:]
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if self._thinking:
            kept = text.rstrip()
            if not closing:  # white space that may stand before the closing tag waits for what follows it
                rest = text[len(kept) :] + rest
            text = kept
        self._held = rest
        if not text:
            return []
        return [Reasoning(text)] if self._thinking else self._content.push(text)


def possible_start(text: str, tags: Iterable[str]) -> int:
    """Length of the longest end of `text` that one of the tags starts with: it may become that tag."""
    lengths = (size for tag in tags for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size]))
    return max(lengths, default=0)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind as one: what is left when the cuts are forgotten."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        else:
            result.append(part)
    return result
