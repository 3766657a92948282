"""How answers to a chat are written: `chat.completion` objects and chunks, of content, reasoning and calls."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..answer import Generation
from ..answer_format import AnswerFormat
from ..parts import Content, Parser, Part, PlainParser, Reasoning, ReasoningParser, ToolCall, joined
from .job import Object
from .logprobs import ScoredToken, TokenNames, chat_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """Of one request."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    answers: AnswerFormat
    calls: bool = False
    """Tools were offered."""
    several: bool = True
    """An answer may have more than one call; else those after the first are left out."""
    thinking: bool = False
    """The prompt ended in the middle of a thought."""
    include_reasoning: bool = True

    @property
    def shown_special_tokens(self) -> tuple[str, ...]:
        return self.answers.tags(calls=self.calls)

    @property
    def plain(self) -> bool:
        """Whether answers are content, whatever is in them."""
        return not (self.calls or self.answers.reasoning)

    def parser(self) -> Parser:
        """Of one answer."""
        return self.answers.parser(calls=self.calls, thinking=self.thinking)

    def writer(self) -> ChatWriter:
        return ChatWriter(self)

    def num_reasoning_tokens(self, generation: Generation) -> int:
        if not self.answers.reasoning:
            return 0
        parser = ReasoningParser(PlainParser(), thinking=self.thinking)
        parser.push(generation.text)
        parser.finish()
        ends = generation.text_ends
        return sum(bisect_right(ends, end) - bisect_right(ends, start) for start, end in parser.spans)

    def logprobs(self, tokens: Sequence[ScoredToken], names: TokenNames) -> Object:
        return chat_logprobs(tokens, names)


class ChatWriter:
    """One choice."""

    def __init__(self, form: ChatForm) -> None:
        self._form, self._parser = form, form.parser()
        self._num_calls = 0

    def whole(self, text: str) -> Object:
        parts = self._parts(text, last=True)
        content = _text(parts, Content)
        message: Object = {"role": "assistant", "content": content or self._nothing(), "refusal": None}
        if self._form.answers.reasoning:
            message |= _reasoning(_text(parts, Reasoning) or None)
        if calls := [_call(part) for part in parts if isinstance(part, ToolCall)]:
            message["tool_calls"] = calls
        return {"message": message}

    def opening(self) -> Object | None:
        return {"delta": {"role": "assistant", "content": self._nothing()}}

    def deltas(self, text: str, *, last: bool) -> list[Object]:
        before = self._num_calls
        deltas = list[Object]()
        for part in self._parts(text, last=last):
            if isinstance(part, Content):
                deltas.append({"content": part.text})
            elif isinstance(part, Reasoning):
                deltas.append(_reasoning(part.text))
            else:
                deltas.append({"tool_calls": [{"index": before} | _call(part)]})
                before += 1
        return [{"delta": delta} for delta in deltas]

    def empty(self) -> Object:
        return {"delta": {}}

    def finish_reason(self, reason: str) -> str:
        """A call that the limit cut off is none: "length" stays."""
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _parts(self, text: str, *, last: bool) -> list[Part]:
        parts = self._parser.push(text) + (self._parser.finish() if last else [])
        return [part for part in joined(parts) if self._wanted(part)]

    def _wanted(self, part: Part) -> bool:
        if isinstance(part, ToolCall):
            if self._num_calls and not self._form.several:
                return False
            self._num_calls += 1
        return self._form.include_reasoning or not isinstance(part, Reasoning)

    def _nothing(self) -> str | None:
        """Content that is not there: null where the answer may be a call instead."""
        return "" if self._form.plain else None


def _text(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _reasoning(text: str | None) -> Object:
    """Under the name that most clients read, and the one vLLM has for it now."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
