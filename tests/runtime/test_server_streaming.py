"""Server-sent events, chunk by chunk, as OpenAI's clients and the benchmarks read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_scheduler import FakeScheduler
from openai import APIError, OpenAI
from pairs import NAMES, Pairs
from served import Served, model, serve

from graphspec.errors import EngineError
from graphspec.runtime.generate import load
from graphspec.runtime.server.model import Model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "stream": True}
HELLO = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def served(pairs: Pairs) -> Iterator[Served]:
    bundle = pairs.bundle(NAMES[1])
    with serve(lambda metrics: model(bundle, metrics)) as running:
        yield running


def chunks(served: Served, path: str, **options: Any) -> list[Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    *events, done = served.post(path, {**prompt, **ASKED, **options}).events
    assert done == "[DONE]"
    return events


def test_a_chat_opens_with_the_role_and_closes_with_the_reason(served: Served) -> None:
    events = chunks(served, CHAT)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {(event["id"], event["created"], event["model"]) for event in events} == {
        (events[0]["id"], events[0]["created"], "tiny")
    }
    assert events[0]["id"].startswith("chatcmpl-")
    choices = [choice for event in events for choice in event["choices"]]
    assert len(choices) == len(events)
    first, *between, last = choices
    assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
    assert all(set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in between)
    assert all(choice["finish_reason"] is None for choice in between)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert not any("usage" in event for event in events)


def test_a_completion_has_texts_and_closes_with_the_reason(served: Served) -> None:
    events = chunks(served, TEXT)
    assert {event["object"] for event in events} == {"text_completion"}
    *between, last = (event["choices"][0] for event in events)
    assert all(choice["text"] and choice["finish_reason"] is None for choice in between)
    assert (last["text"], last["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_comes_last_in_a_chunk_without_choices(served: Served, path: str) -> None:
    *events, last = chunks(served, path, stream_options={"include_usage": True})
    assert all(event["choices"] and event["usage"] is None for event in events)
    assert last["choices"] == []
    whole = served.post(path, {"messages": HELLO, "prompt": "abc", **ASKED, "stream": False}).json
    assert last["usage"] == whole["usage"]
    assert last["metrics"] == whole["metrics"]


def test_continuous_usage_counts_the_tokens_so_far(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = chunks(served, TEXT, stream_options=options, return_token_ids=True)
    counted = 0
    for event in events:
        counted += len(event["choices"][0].get("token_ids", []))
        assert event["usage"]["completion_tokens"] == counted
        assert event["usage"]["total_tokens"] == counted + 3
    assert last["usage"]["completion_tokens"] == counted == 12


def test_chunks_have_as_many_tokens_as_are_asked_for(served: Served) -> None:
    asked = {"max_tokens": 40, "speculative": False, "return_token_ids": True}
    each = chunks(served, TEXT, **asked)
    events = chunks(served, TEXT, **asked, stream_interval=8)
    counts = [len(event["choices"][0].get("token_ids", ())) for event in events]
    assert counts == [1, 8, 8, 8, 8, 7, 0]
    assert ["".join(event["choices"][0]["text"] for event in one) for one in (each, events)] == [
        "".join(event["choices"][0]["text"] for event in each)
    ] * 2


def test_why_it_stopped_is_told(served: Served) -> None:
    (whole,) = served.post(TEXT, {"prompt": "abc", "max_tokens": 12, "temperature": 0}).json["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    asked = {"temperature": 0, "max_tokens": 12, "stop": [whole["text"][5]]}
    *_, last = chunks(served, TEXT, **asked)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", whole["text"][5])
    (token,) = served.post("/tokenize", {"prompt": whole["text"][5]}).json["tokens"]
    (choice,) = served.post(
        TEXT, {"prompt": "abc", "max_tokens": 12, "temperature": 0, "stop_token_ids": [token]}
    ).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_events_are_ascii_so_that_no_client_splits_them(served: Served) -> None:
    reply = served.post(TEXT, {"prompt": "abc", **ASKED, "max_tokens": 100, "temperature": 2.0})
    assert reply.text.isascii()
    text = "".join(event["choices"][0]["text"] for event in reply.events[:-1])
    assert not text.isascii()


def test_no_choices_at_all_are_a_stream_too(served: Served) -> None:
    (opening, closing) = chunks(served, CHAT, max_tokens=0)
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    assert closing["choices"][0]["finish_reason"] == "length"
    (only,) = chunks(served, TEXT, max_tokens=0, echo=True)[:1]
    assert only["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_on_the_way_is_told(pairs: Pairs, stream: bool) -> None:
    scheduler: Any = FakeScheduler()
    scheduler.may_close.set()
    bundle = load(pairs.bundle(NAMES[1]), num_threads=1)
    with (
        serve(lambda _: Model(bundle=bundle, scheduler=scheduler)) as running,
        OpenAI(base_url=running.url, api_key="none", max_retries=0) as client,
    ):

        def fail() -> None:
            (ticket,) = scheduler.wait_for(1)
            ticket.give_text("ab")
            ticket.give(EngineError("the device is gone"))

        failing = threading.Thread(target=fail)
        failing.start()
        seen = []
        with pytest.raises(APIError, match="the device is gone") as error:  # noqa: PT012
            answer: Any = client.completions.create(model="tiny", prompt="abc", stream=stream)
            seen += [chunk.choices[0].text for chunk in answer]
        failing.join()
        assert seen == []  # raised on the way
        assert getattr(error.value, "status_code", None) == (None if stream else 500)
