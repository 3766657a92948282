"""Tool calls and reasoning over HTTP: what goes to the template, what comes back, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import NAMES, Pairs
from scripted import ASKED, TEMPLATE, WEATHER, Scripted, scripted
from served import serve

from graphspec.runtime.answer_format import AnswerFormat
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.server.model import start
from graphspec.runtime.text import Tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.fixture(scope="module")
def hermes(pairs: Pairs) -> Iterator[Scripted]:
    with scripted(pairs, AnswerFormat(tools="hermes", reasoning=True)) as running:
        yield running


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def accumulated(events: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """The message that the deltas of a stream make, as a client puts it together, and why it ended."""
    message: dict[str, Any] = {}
    *chunks, done = events
    assert done == "[DONE]"
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    known = message.setdefault(name, [])
                    if call["index"] == len(known):
                        assert call["id"]
                        assert call["type"] == "function"
                        known.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                    else:
                        assert not {"id", "type"} & call.keys()
                    for part in ("name", "arguments"):
                        known[call["index"]]["function"][part] += call["function"].get(part, "")
            else:
                message[name] = value if message.get(name) is None else message[name] + value
        assert (choice["finish_reason"] is None) == (chunk is not chunks[-1])
    return message, chunks[-1]["choices"][0]["finish_reason"]


def test_a_call_is_a_call_and_not_content(hermes: Scripted) -> None:
    choice = hermes.choice(CALL)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert calls(choice["message"]) == [("weather", {"city": "Köln"})]


def test_content_reasoning_and_calls_are_told_apart(hermes: Scripted) -> None:
    message = hermes.choice(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}")["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert message["content"] == "Let me see."
    assert len(calls(message)) == 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("text", ["<tool_call>nonsense</tool_call>", "<tool_call>", "no call", ' {"name": "weather"}'])
def test_what_is_no_call_is_content(hermes: Scripted, text: str) -> None:
    for stream in (False, True):
        reply = hermes.ask(*text, stream=stream)
        message, reason = accumulated(reply.events) if stream else (reply.json["choices"][0]["message"], "stop")
        assert message["content"] == text
        assert "tool_calls" not in message
        assert reason == "stop"


def test_an_answer_that_was_cut_off_says_so(hermes: Scripted) -> None:
    assert hermes.choice(f"{CALL} and", finish_reason="length")["finish_reason"] == "length"


def test_only_one_call_if_only_one_is_wanted(hermes: Scripted) -> None:
    for stream in (False, True):
        reply = hermes.ask(f"{CALL}{CALL}", parallel_tool_calls=False, stream=stream)
        message = accumulated(reply.events)[0] if stream else reply.json["choices"][0]["message"]
        assert len(calls(message)) == 1


def test_without_tools_nothing_is_a_call(hermes: Scripted) -> None:
    without: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for changes in without:
        choice = hermes.choice(f"{THOUGHT}{CALL}", **changes)
        assert choice["message"]["content"] == CALL
        assert choice["message"]["reasoning_content"] == "hm"
        assert choice["finish_reason"] == "stop"
        assert "weather" not in hermes.prompt


def test_reasoning_may_be_left_out(hermes: Scripted) -> None:
    message = hermes.choice(f"{THOUGHT}Yes.", include_reasoning=False)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", None)


def test_a_thought_may_begin_in_the_prompt(hermes: Scripted) -> None:
    message = hermes.choice("hm</think>Yes.", chat_template_kwargs={"thinking": True})["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")
    message = hermes.choice("hm</think>Yes.")["message"]
    assert (message["content"], message["reasoning_content"]) == ("hm</think>Yes.", None)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_reasoning_are_counted(hermes: Scripted, stream: bool) -> None:
    """One token is one character here."""

    def told(*pieces: str, **changes: Any) -> int:
        reply = hermes.ask(
            *pieces, stream=stream, stream_options={"include_usage": True} if stream else None, **changes
        )
        usage = reply.events[-2]["usage"] if stream else reply.json["usage"]
        count: int = usage["completion_tokens_details"]["reasoning_tokens"]
        return count

    assert told(*THOUGHT, "Yes.") == len("\nhm\n")
    assert told("a<think>bc</think>d<think>e") == 3
    assert told("abc</think>d", chat_template_kwargs={"thinking": True}) == 3
    assert told("Yes.") == 0


def test_tools_and_earlier_calls_go_to_the_template(hermes: Scripted) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 5}'}}
    messages = [
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, {"function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "ok", "tool_calls": []},
    ]
    hermes.choice("x", messages=messages)
    tools = json.dumps([WEATHER]).replace(" ", "!")  # the tiny vocabulary has no space
    assert hermes.prompt == f"{tools};a=+(weather:5)(f:)hm,t=rain,a=ok,"


def test_the_tags_are_text_even_as_special_tokens(hermes: Scripted) -> None:
    hermes.choice("x")
    shown = hermes.scheduler.tickets[-1].request.params.shown_special_tokens
    assert set(shown) == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    hermes.choice("x", skip_special_tokens=False)
    assert hermes.scheduler.tickets[-1].request.params.skip_special_tokens is False


def test_each_choice_has_its_own_calls(hermes: Scripted) -> None:
    whole = hermes.ask(*CALL, n=2).json["choices"]
    assert [calls(choice["message"]) for choice in whole] == [[("weather", {"city": "Köln"})]] * 2
    chunks = hermes.ask(*CALL, n=2, stream=True).events[:-1]
    for index in (0, 1):
        own = [{"choices": [one]} for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert calls(accumulated([*own, "[DONE]"])[0]) == [("weather", {"city": "Köln"})]


def test_a_model_that_says_a_special_token_is_heard_where_it_may_begin_a_call(pairs: Pairs) -> None:
    root, template = pairs.bundle(NAMES[1]), "{% if tools and false %}{% endif %}abc"
    said = pairs.loaded(NAMES[1]).generate("abc", SamplingParams(max_new_tokens=12))[0].token_ids
    # Its third token becomes special, under the name that Llama's calls begin with.
    content = json.loads((root / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    (symbol,) = (symbol for symbol, token_id in vocabulary.items() if token_id == said[2])
    vocabulary["<|python_tag|>"] = vocabulary.pop(symbol)
    token = {"id": said[2], "content": "<|python_tag|>", "special": True}
    content["added_tokens"] = [token | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)]
    bundle = load(root, num_threads=1)
    bundle.tokenizer = Tokenizer({"tokenizer.json": json.dumps(content).encode()})
    bundle.tokenizer.chat_template = template
    with serve(lambda metrics: start(bundle, metrics, answers=AnswerFormat(tools="llama3_json"))) as served:
        for tools, times in (([WEATHER], said.count(said[2])), ([], 0)):
            for stream in (False, True):
                body = {"messages": ASKED, "tools": tools, "max_tokens": 12, "temperature": 0, "stream": stream}
                reply = served.post("/v1/chat/completions", body)
                message = accumulated(reply.events)[0] if stream else reply.json["choices"][0]["message"]
                assert message["content"].count("<|python_tag|>") == times


@pytest.mark.parametrize(
    ("answers", "template", "said"),
    [
        (AnswerFormat(), TEMPLATE, "--tool-call-parser"),
        (AnswerFormat(tools="hermes"), "{{ messages[0].content }}", "no place for them"),
    ],
)
def test_tools_that_cannot_be_taken_are_refused(pairs: Pairs, answers: AnswerFormat, template: str, said: str) -> None:
    with scripted(pairs, answers, template) as running:
        reply = running.ask("x")
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert said in reply.error["message"]
        plain = running.choice(CALL, tools=None)["message"]
        assert (plain["content"], "reasoning_content" in plain) == (CALL, False)


def test_what_is_wrong_with_a_tool_is_told_with_its_place(hermes: Scripted) -> None:
    error = hermes.ask(tools=[WEATHER, {"type": "function", "function": {"name": 5}}]).error
    assert error["param"] == "tools"
    assert error["message"].startswith("tools[1].function.name: ")


FRAGMENTS = [
    CALL,
    THOUGHT,
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<",
    " ",
    "\n",
    "word",
    "é",
    '{"name"',
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=7).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "parallel_tool_calls": st.just(False),
            "include_reasoning": st.just(False),
            "chat_template_kwargs": st.just({"thinking": True}),
            "tool_choice": st.sampled_from(["none", "auto"]),
        },
    ),
)
def test_a_stream_makes_the_same_message_however_the_text_was_cut(
    hermes: Scripted, text: str, cuts: list[int], changes: dict[str, Any]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges) if a < b]
    whole = hermes.choice(*pieces, **changes)
    message, reason = accumulated(hermes.ask(*pieces, **changes, stream=True).events)
    assert reason == whole["finish_reason"]
    expected = whole["message"]
    for one in (message, expected):
        for call in one.get("tool_calls", ()):
            del call["id"]
    assert message == {name: value for name, value in expected.items() if value is not None or name == "content"}
