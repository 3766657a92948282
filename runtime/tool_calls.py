"""Tool calls in the three forms that open models write them in.

    hermes     <tool_call>{"name": …, "arguments": {…}}</tool_call>       Hermes, Qwen
    llama3     {"name": …, "parameters": {…}}, several with ";" between    Llama 3.1 to 3.3
    pythonic   [name(key="value"), other(n=1)]                             Llama 3.2, Llama 4

A call is given whole, when it has ended. What looks like a call and is none stays content, to the letter.
"""

from __future__ import annotations

import ast
import json
from typing import Any, Literal

from .parts import Content, Parser, Part, PlainParser, ToolCall, possible_start

ToolFormat = Literal["hermes", "llama3", "pythonic"]
TOOL_FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "pythonic")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


def tool_parser(form: ToolFormat | None) -> Parser:
    """A parser of that form; None: no calls are looked for."""
    if form is None:
        return PlainParser()
    return HermesParser() if form == "hermes" else WholeAnswerParser(form)


class HermesParser:
    """Calls between tags, content around them."""

    def __init__(self) -> None:
        self._held = ""
        self._called = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                certain = len(self._held) - possible_start(self._held, (_OPEN,))
                return parts + self._content(certain)
            parts += self._content(start)
            end = self._held.find(_CLOSE)
            if end < 0:
                return parts
            block, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            parts += self._block(block, block[len(_OPEN) : -len(_CLOSE)])

    def finish(self) -> list[Part]:
        """A model that stops at the closing tag's token leaves it out."""
        if not self._held.startswith(_OPEN):
            return self._content(len(self._held), last=True)
        block, self._held = self._held, ""
        return self._block(block, block[len(_OPEN) :])

    def _block(self, block: str, inside: str) -> list[Part]:
        call = _json_call(_decoded(inside))
        if call is None:
            return [Content(block)]
        self._called = True
        return [call]

    def _content(self, length: int, *, last: bool = False) -> list[Part]:
        """White space in front of a call is layout; elsewhere it is content, and waits to know which."""
        text, rest = self._held[:length], self._held[length:]
        kept = text.rstrip()
        space = text[len(kept) :]
        if rest.startswith(_OPEN) or (last and self._called and not kept):
            space = ""  # before a call, or after the last one
        elif last:
            kept, space = text, ""
        self._held = space + rest
        return [Content(kept)] if kept else []


class WholeAnswerParser:
    """An answer that is calls from its first character to its last, or content."""

    def __init__(self, form: Literal["llama3", "pythonic"]) -> None:
        self._form = form
        self._held = ""
        self._is_content = False

    def push(self, text: str) -> list[Part]:
        if self._is_content:
            return [Content(text)] if text else []
        self._held += text
        if self._may_be_calls():
            return []
        self._is_content = True
        text, self._held = self._held, ""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        text, self._held = self._held, ""
        if not text:
            return []
        body = text.strip().removeprefix(_PYTHON_TAG)
        calls = _json_calls(body) if self._form == "llama3" else _python_calls(body)
        return list(calls) if calls else [Content(text)]

    def _may_be_calls(self) -> bool:
        text = self._held.lstrip()
        if not text or (len(text) < len(_PYTHON_TAG) and _PYTHON_TAG.startswith(text)):
            return True
        body = text.removeprefix(_PYTHON_TAG).lstrip()
        return not body or body.startswith("{" if self._form == "llama3" else "[")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _json_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # an object written as text
        arguments = _decoded(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def _json_calls(text: str) -> list[ToolCall]:
    """Objects one after another, with ";" or white space between; [] if anything else is there."""
    decoder, place = json.JSONDecoder(), 0
    calls = []
    while place < len(text):
        if text[place] in "; \t\r\n":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            return []
        call = _json_call(value)
        if call is None:
            return []
        calls.append(call)
    return calls


def _python_calls(text: str) -> list[ToolCall]:
    """A list of calls with keyword arguments that are literals; [] if it is anything else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(item) for item in tree.elts]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("not a call with keywords")
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return ToolCall(name=ast.unparse(node.func), arguments=json.dumps(arguments, ensure_ascii=False))
