"""What a server refuses, and how it says so; what it takes and ignores."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from callers import reached
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI
from pairs import MAX_LENGTH, NAMES, Pairs
from served import Reply, Served, model, serve

from graphspec.runtime.generate import load
from graphspec.runtime.server.model import start

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "abc"}]
BASE = {CHAT: {"messages": HELLO, "max_tokens": 2}, TEXT: {"prompt": "abc", "max_tokens": 2}}
MISSING = object()


@pytest.fixture(scope="module")
def served(pairs: Pairs) -> Iterator[Served]:
    bundle = pairs.bundle(NAMES[1])
    with serve(lambda metrics: model(bundle, metrics)) as running:
        yield running


def ask(served: Served, path: str, **changes: Any) -> Reply:
    body = {name: value for name, value in {**BASE[path], **changes}.items() if value is not MISSING}
    return served.post(path, body)


BOTH: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": MAX_LENGTH}, "max_tokens"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": "all"}, "stream_options"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"guided_json": {}, "guided_regex": "a+"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"best_of": 2}, "best_of"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"priority": 1}, "priority"),
]
TEXT_ONLY: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": MISSING}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [128]}, "prompt"),
    ({"prompt": [-1], "echo": True}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "a" * MAX_LENGTH}, "prompt"),
    ({"prompt": ["a"] * 3000}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 128}, "n"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"),
]
CHAT_ONLY: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": MISSING}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "abc"}, "messages"),
    ({"messages": ["abc"]}, "messages"),
    ({"messages": [{"content": "abc"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * MAX_LENGTH}]}, "messages"),
    ({"max_completion_tokens": MAX_LENGTH}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}], "tool_choice": "none"}, "tools"),
    ({"tools": [{"type": "function", "function": {}}], "tool_choice": "none"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}], "tool_choice": "none"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}], "tool_choice": "none"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}]}, "messages"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]
CASES = [(path, *case) for path in (CHAT, TEXT) for case in BOTH]
CASES += [(TEXT, *case) for case in TEXT_ONLY] + [(CHAT, *case) for case in CHAT_ONLY]


@pytest.mark.parametrize(
    ("path", "changes", "param"), CASES, ids=lambda value: re.sub(r" at 0x\w+", "", str(value))[:40]
)
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(
    served: Served, path: str, changes: dict[str, Any], param: str | None
) -> None:
    for stream in (False, True):
        reply = ask(served, path, **{"stream": stream, **changes})
        assert reply.status == 400
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == param
        assert reply.error["message"]


def test_options_of_streams_are_for_streams(served: Served) -> None:
    reply = ask(served, TEXT, stream_options={"include_usage": True})
    assert (reply.status, reply.error["param"]) == (400, "stream_options")


IGNORED: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "logprobs": False,
    "stop": None,
    "best_of": 1,
    "user": "somebody",
    "service_tier": "auto",
    "store": False,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "none",
    "reasoning_effort": "low",
    "ignore_eos": True,
    "min_tokens": 0,
    "top_k": -1,
    "skip_special_tokens": True,
    "request_id": "1",
    "cache_salt": "salt",
    "stream_interval": 1,
    "return_tokens_as_token_ids": False,
    "no_such_field": {"deep": [1]},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_asks_for_nothing_is_ignored(served: Served, path: str) -> None:
    asked = {"seed": 1, "temperature": 0.9}
    plain, full = (ask(served, path, **asked, **extra).json["choices"] for extra in ({}, IGNORED))
    assert plain == full


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_null_is_a_field_that_was_not_given(served: Served, path: str) -> None:
    names = {name for changes, _ in BOTH + TEXT_ONLY + CHAT_ONLY for name in changes} - {"messages", "prompt"}
    reply = ask(served, path, **{**dict.fromkeys(names), "seed": 1})
    assert reply.status == 200


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"5", b'"a"', b"\xff", b"[" * 100_000, b'{"temperature": NaN}', b"1" * 5000]
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_a_400(served: Served, path: str, content: bytes) -> None:
    reply = served.post(path, content)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": ["a"]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [128]}, "tokens"),
    ],
)
def test_the_tokenizer_refuses_what_is_no_text_and_no_token(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    reply = served.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_lengths_are_told_with_both_numbers(served: Served) -> None:
    error = ask(served, TEXT, prompt="a" * 200).error
    assert "200" in error["message"]
    assert str(MAX_LENGTH) in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_text_that_cannot_fit_is_refused_before_it_is_made_tokens(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it takes a second and a hundred megabytes for each of its own")

    loaded = served.serving.ready().bundle
    monkeypatch.setattr(loaded.tokenizer, "encode", encode)
    text = "a" * 10**6
    error = ask(served, path, **({"prompt": text} if path == TEXT else {"messages": [{"role": "u", "content": text}]}))
    assert (error.status, error.error["code"]) == (400, "context_length_exceeded")
    assert re.search(rf"100000\d characters, .* tokens at least, .* {MAX_LENGTH} ", error.error["message"])


def test_long_bodies_are_read_one_at_a_time_and_short_ones_beside_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, most, short = 0, 0, threading.Event()

    def tokenize(body: Any, _: Any) -> dict[str, Any]:
        nonlocal reading, most
        if len(body.prompt) < 10:
            short.set()
            return {}
        reading += 1
        most = max(most, reading)
        assert short.wait(30), "it waits for no long one"
        time.sleep(0.05)
        reading -= 1
        return {}

    monkeypatch.setattr("graphspec.runtime.server.app.tokenize", tokenize)
    with ThreadPoolExecutor() as clients:
        long = [clients.submit(served.post, "/tokenize", {"prompt": "a" * 2**19}) for _ in range(4)]
        assert reached(lambda: reading == 1)
        assert served.post("/tokenize", {"prompt": "a"}).status == 200
        assert [one.result().status for one in long] == [200] * 4
    assert most == 1


def test_a_template_that_fails_is_a_400_and_none_at_all_says_what_to_use(pairs: Pairs) -> None:
    def refusing(template: str | None) -> Any:
        def loaded(metrics: Any) -> Any:
            bundle = load(pairs.bundle(NAMES[1]), num_threads=1)
            bundle.tokenizer.chat_template = template
            return start(bundle, metrics)

        return loaded

    for template, said in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.x.y }}", "template"),
        (None, "/v1/completions"),
    ):
        with serve(refusing(template)) as running:
            reply = ask(running, CHAT)
            assert (reply.status, reply.error["param"]) == (400, "messages")
            assert said in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        (TEXT, {"prompt": ["a", 3]}, "prompt[1]: Input should be a valid string"),
        (TEXT, {"prompt": [1, "x"]}, "prompt[1]: Input should be a valid integer"),
        (TEXT, {"prompt": [[1], [2, "x"]]}, "prompt[1][1]: Input should be a valid integer"),
        (TEXT, {"prompt": 5}, "prompt: Input should be a valid string; or Input should be a valid list"),
        (TEXT, {"stop": ["a", 1]}, "stop[1]: Input should be a valid string"),
        (TEXT, {"stop": ""}, "stop is ['']: it must be"),
        (TEXT, {"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage: "),
        (TEXT, {"min_tokens": 3}, "min_tokens is 3: it must be at most max_tokens (2)"),
        (CHAT, {"min_tokens": 3, "max_completion_tokens": 2}, "it must be at most max_completion_tokens (2)"),
        (CHAT, {"messages": [*HELLO, {"role": "user"}]}, "messages[1].content is None: give a text"),
        (CHAT, {"messages": [{"role": "tool", "content": None}]}, "messages[0].content is None: give a text"),
    ],
)
def test_an_error_names_the_item_in_the_clients_words(
    served: Served, path: str, changes: dict[str, Any], said: str
) -> None:
    reply = ask(served, path, **changes)
    assert reply.status == 400
    assert said in reply.error["message"]
    assert reply.error["param"] in changes


def test_an_assistant_may_have_said_nothing(pairs: Pairs) -> None:
    bundle = load(pairs.bundle(NAMES[1]), num_threads=1)
    bundle.tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + m.content + 'b' }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    with serve(lambda metrics: start(bundle, metrics)) as running:
        for silent in ({}, {"content": None}, {"content": ""}):
            message = {"role": "assistant", "tool_calls": [call], **silent}
            reply = ask(running, CHAT, messages=[*HELLO, message], return_token_ids=True)
            assert reply.status == 200, reply.error
            assert bundle.tokenizer.decode(reply.json["choices"][0]["prompt_token_ids"]) == "uabcbab"


def test_openais_client_raises_its_own_errors(served: Served) -> None:
    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        with pytest.raises(NotFoundError, match="not served here") as missing:
            client.completions.create(model="gpt-5", prompt="abc")
        assert missing.value.code == "model_not_found"
        with pytest.raises(BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="abc", logit_bias={"5": 1})
        assert refused.value.param == "logit_bias"


def test_other_paths_and_methods_are_told_in_the_same_form(served: Served) -> None:
    for reply, status in ((served.get("/v1/nothing"), 404), (served.get(TEXT), 405), (served.post("/health", {}), 405)):
        assert reply.status == status
        assert reply.error["message"]


def test_a_body_that_is_too_long_is_a_413(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.runtime.server.app.MAX_BODY", 1000)
    assert ask(served, TEXT).status == 200
    reply = ask(served, TEXT, prompt="a" * 1000)
    assert reply.status == 413
    assert "1000 bytes" in reply.error["message"]


def test_a_key_is_asked_for_where_there_is_one(pairs: Pairs) -> None:
    bundle = pairs.bundle(NAMES[1])
    with serve(lambda metrics: model(bundle, metrics), api_key="sécret") as running:
        assert [running.get(path).status for path in ("/health", "/ping", "/version", "/metrics")] == [200] * 4
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode().decode("latin-1")}):
            reply = running.get("/v1/models", **headers)
            assert (reply.status, reply.error["type"]) == (401, "authentication_error")
        assert running.post(TEXT, {"prompt": "abc"}).status == 401
        right = {"Authorization": "Bearer " + "sécret".encode().decode("latin-1")}
        assert running.get("/v1/models", **right).status == 200
        with OpenAI(base_url=running.url, api_key="no", max_retries=0) as client, pytest.raises(AuthenticationError):
            client.models.list()


SMALL = st.none() | st.booleans() | st.integers(-3, 70) | st.floats(-1, 2) | st.text("ab", max_size=3)
ANY = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2))
FIELDS = sorted({name for changes, _ in BOTH + TEXT_ONLY + CHAT_ONLY for name in changes} | {"model", "echo", "stop"})


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT]), changes=st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=4))
def test_no_body_is_the_servers_fault(served: Served, path: str, changes: dict[str, Any]) -> None:
    reply = served.post(path, json.dumps({**BASE[path], **changes}).encode())
    assert reply.status in (200, 400, 404)
    if reply.status != 200:
        assert reply.error["message"]
