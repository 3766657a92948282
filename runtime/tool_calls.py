"""Tool calls in the three forms that open models write them in.

    hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>     Hermes, Qwen
    llama3_json  {"name": …, "parameters": {…}}, several with ";" between  Llama 3.1 to 3.3
    pythonic     [name(key="value"), other(n=1)]                           Llama 3.2, Llama 4

A call is given whole, when it has ended. What looks like a call and is none stays content, to the letter.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from .parts import Content, Parser, Part, PlainParser, ToolCall, possible_start

ToolFormat = Literal["hermes", "llama3_json", "pythonic"]
TOOL_FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json", "pythonic")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
TAGS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": (_OPEN, _CLOSE),
    "llama3_json": (_PYTHON_TAG,),
    "pythonic": (_PYTHON_TAG,),
}
"""What is looked for around calls."""


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

    def __init__(self, form: Literal["llama3_json", "pythonic"]) -> None:
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
        calls = _json_calls(body) if self._form == "llama3_json" else _python_calls(body)
        return list(calls) if calls else [Content(text)]

    def _may_be_calls(self) -> bool:
        text = self._held.lstrip()
        if not text or (len(text) < len(_PYTHON_TAG) and _PYTHON_TAG.startswith(text)):
            return True
        body = text.removeprefix(_PYTHON_TAG).lstrip()
        return not body or body.startswith("{" if self._form == "llama3_json" else "[")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # an object written as text
        arguments = _decoded(arguments)
    return _call(value["name"], arguments) if isinstance(arguments, dict) else None


def _call(name: str, arguments: dict[str, Any]) -> ToolCall | None:
    try:
        return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError):  # NaN, or what only Python has
        return None


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
        except (ValueError, RecursionError):
            return []
        # Any object may have a name: without tags around it, what it is called with tells a call.
        has_arguments = isinstance(value, dict) and not value.keys().isdisjoint(("parameters", "arguments"))
        call = _json_call(value) if has_arguments else None
        if call is None:
            return []
        calls.append(call)
    return calls


def _python_calls(text: str) -> list[ToolCall]:
    """A list of calls with keyword arguments that are literals; [] if it is anything else."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in strings: this is a model's Python
            tree = ast.parse(text, mode="eval").body
        calls = [_python_call(item) for item in tree.elts] if isinstance(tree, ast.List) else []
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else []


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        return None
    name = ast.unparse(node.func)
    if not all(word.isidentifier() for word in name.split(".")):
        return None
    return _call(name, {str(word.arg): ast.literal_eval(_JsonNames().visit(word.value)) for word in node.keywords})


class _JsonNames(ast.NodeTransformer):
    """Models that write Python remember JSON's names for its constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node
