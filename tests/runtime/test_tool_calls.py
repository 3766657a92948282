"""Reasoning and tool calls: each form of them, however the text was cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.runtime.parts import Content, Parser, Part, PlainParser, Reasoning, ReasoningParser, ToolCall, joined
from graphspec.runtime.tool_calls import TOOL_FORMATS, tool_parser


def parsed(parser: Parser, pieces: Sequence[str]) -> list[Part]:
    return joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CASES: list[tuple[str, str, list[Part]]] = [
    ("hermes", "Hello <b>there</b>", [Content("Hello <b>there</b>")]),
    ("hermes", HERMES, [call("weather", city="Köln")]),
    ("hermes", f"Let me see.\n{HERMES}", [Content("Let me see."), call("weather", city="Köln")]),
    ("hermes", f"{HERMES}\n{HERMES}\n", [call("weather", city="Köln"), call("weather", city="Köln")]),
    ("hermes", HERMES.removesuffix("</tool_call>"), [call("weather", city="Köln")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [call("f")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call("f", a=1)]),
    ("hermes", "<tool_call>nonsense</tool_call>", [Content("<tool_call>nonsense</tool_call>")]),
    ("hermes", "a <tool_", [Content("a <tool_")]),
    ("hermes", " \n", [Content(" \n")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [call("f", a=1)]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [call("f", a=1)]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": "}"}}',
        [call("f"), call("g", b="}")],
    ),
    ("llama3_json", '{"answer": 42}', [Content('{"answer": 42}')]),
    ("llama3_json", '{"name": "f", "param', [Content('{"name": "f", "param')]),
    ("llama3_json", "No {braces}", [Content("No {braces}")]),
    (
        "pythonic",
        '[f(a=1, b="x, y"), g.h(c=[1, 2])]',
        [call("f", a=1, b="x, y"), ToolCall(name="g.h", arguments='{"c": [1, 2]}')],
    ),
    ("pythonic", "[1, 2]", [Content("[1, 2]")]),
    ("pythonic", "[f(1)]", [Content("[f(1)]")]),
    ("pythonic", "[f(a=open('x'))]", [Content("[f(a=open('x'))]")]),
    ("pythonic", "[]", [Content("[]")]),
    ("pythonic", "Well.", [Content("Well.")]),
    ("pythonic", "[f(a=true, b=[null])]", [call("f", a=True, b=[None])]),
    ("pythonic", r"[f(a='\d')]", [call("f", a="\\d")]),
    ("pythonic", "[f(a=1e999)]", [Content("[f(a=1e999)]")]),
    ("pythonic", "[f(a={1, 2})]", [Content("[f(a={1, 2})]")]),
    ("pythonic", "[(lambda: 1)(a=1)]", [Content("[(lambda: 1)(a=1)]")]),
    ("pythonic", "[f(a=1), 2]", [Content("[f(a=1), 2]")]),
    ("pythonic", "[" * 5000, [Content("[" * 5000)]),
    ("llama3_json", '{"name": "Bob", "age": 5}', [Content('{"name": "Bob", "age": 5}')]),
    ("llama3_json", '{"a":' * 5000, [Content('{"a":' * 5000)]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        [Content('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>')],
    ),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_an_answer_is_calls_and_content(form: str, text: str, expected: list[Part]) -> None:
    assert parsed(tool_parser(form), [text]) == expected  # type: ignore[arg-type]
    assert parsed(tool_parser(form), list(text)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, [Reasoning("hm"), Content("Yes.")]),
        ("hm, 1 < 2\n</think>Yes.", True, [Reasoning("hm, 1 < 2"), Content("Yes.")]),
        ("Yes.", False, [Content("Yes.")]),
        ("<think></think>Yes.", False, [Content("Yes.")]),
        ("<think>never ends", False, [Reasoning("never ends")]),
        ("a <think>b</think> c", False, [Content("a"), Reasoning("b"), Content(" c")]),
        (f"<think>call it</think>\n{HERMES}", False, [Reasoning("call it"), call("weather", city="Köln")]),
        ("<think>{}</think>".format("a  b \n c "), False, [Reasoning("a  b \n c")]),
    ],
)
def test_reasoning_is_split_off(text: str, thinking: bool, expected: list[Part]) -> None:
    for pieces in ([text], list(text)):
        assert parsed(ReasoningParser(tool_parser("hermes"), thinking=thinking), pieces) == expected


@pytest.mark.parametrize("text", ["<think>ab</think>c<think>d</think>", "a<think>b", "<think></think>", "abc"])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_places_of_reasoning_are_told(text: str, thinking: bool) -> None:
    for pieces in ([text], list(text)):
        parser = ReasoningParser(PlainParser(), thinking=thinking)
        parts = parsed(parser, pieces)
        told = "".join(text[start:end] for start, end in parser.spans)
        assert told == "".join(part.text for part in parts if isinstance(part, Reasoning))


PARSERS: list[Callable[[], Parser]] = [
    PlainParser,
    lambda: ReasoningParser(PlainParser()),
    lambda: ReasoningParser(tool_parser("hermes"), thinking=True),
    *(lambda form=form: tool_parser(form) for form in TOOL_FORMATS),
]
FRAGMENTS = [
    HERMES,
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<",
    " ",
    "\n",
    "word",
    '{"name": "f"}',
    ";",
    "[f(a=1)]",
    "é",
]


@settings(max_examples=100, deadline=None)
@given(
    parser=st.sampled_from(range(len(PARSERS))),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_how_the_text_is_cut_changes_nothing(parser: int, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert parsed(PARSERS[parser](), pieces) == parsed(PARSERS[parser](), [text])


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(["<", "tool", ">", "a", " ", "b\n"]), max_size=10).map("".join))
def test_content_without_calls_is_kept_to_the_letter(text: str) -> None:
    assert "".join(part.text for part in parsed(tool_parser("hermes"), list(text)) if isinstance(part, Content)) == text
