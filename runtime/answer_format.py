"""Which of the forms that parts.py and tool_calls.py read a model writes its answers in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self, cast

from graphspec.errors import ConfigError

from .parts import END_OF_THINK, THINK, Parser, ReasoningParser
from .tool_calls import TAGS, TOOL_FORMATS, ToolFormat, tool_parser

NONE = "none"
REASONING_FORMATS = ("think", "qwen3", "deepseek_r1")
"""One form under three names: vLLM has it under those of models."""

_SIGNS: tuple[tuple[str, ToolFormat], ...] = (
    (r"\A(?!.*(?:<function=|<arg_key>)).*<tool_call>.*\"arguments\\?\"", "hermes"),
    (r"function name, \\?\"parameters\\?\":", "llama3_json"),
    (r"\[func_name1\(params_name1=params_value1", "pythonic"),
)
"""What templates tell a model about calls; some forms have the tags of "hermes", and XML inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How a model marks its calls of tools and its reasoning, as far as is known."""

    tools: ToolFormat | None = None
    reasoning: bool = False
    """Between <think> and </think>."""

    @classmethod
    def of(cls, template: str | None) -> Self:
        """As a chat template says it, to the model or to its own code."""
        said = template or ""
        tools = next((form for sign, form in _SIGNS if re.search(sign, said, re.DOTALL)), None)
        return cls(tools=tools, reasoning=END_OF_THINK in said)

    @classmethod
    def chosen(cls, template: str | None, *, tools: str | None = None, reasoning: str | None = None) -> Self:
        """By name, or "none"; what is None, the template says. Raises ConfigError for other names."""
        found = cls.of(template)
        for name, known in ((tools, TOOL_FORMATS), (reasoning, REASONING_FORMATS)):
            if name is not None and name not in (*known, NONE):
                raise ConfigError(f"no parser is called {name!r}: use {', '.join(known)} or {NONE}")
        form = None if tools == NONE else cast("ToolFormat", tools)
        return cls(
            tools=found.tools if tools is None else form,
            reasoning=found.reasoning if reasoning is None else reasoning != NONE,
        )

    def parser(self, *, calls: bool, thinking: bool) -> Parser:
        """Of one answer. `calls`: tools were offered; `thinking`: the prompt ended with <think>."""
        content = tool_parser(self.tools if calls else None)
        return ReasoningParser(content, thinking=thinking) if self.reasoning else content

    def tags(self, *, calls: bool) -> tuple[str, ...]:
        """What that parser looks for: text, even where a tokenizer has special tokens for it."""
        thought = (THINK, END_OF_THINK) if self.reasoning else ()
        return (*thought, *(TAGS[self.tools] if calls and self.tools else ()))


def opens_thought(prompt: str) -> bool:
    """Whether the answer to this chat begins as reasoning."""
    return prompt.rstrip().endswith(THINK)
