"""Tools, reasoning, headers and errors, as OpenAI's own client puts them together."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_scheduler import FakeScheduler
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
    RateLimitError,
    pydantic_function_tool,
)
from pairs import NAMES, Pairs
from pydantic import BaseModel
from scripted import Scripted, scripted
from served import Served, model, serve

from graphspec.runtime.answer_format import AnswerFormat
from graphspec.runtime.generate import load
from graphspec.runtime.server.model import Model

ASKED: Any = [{"role": "user", "content": "abc"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "strict": True}}
THOUGHT = "<think>hm</think>"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
CALLS = CALL + CALL.replace("Köln", "x")
COUNTS = "{{ (tools or []) | length }}{{ messages | length }}"


class Weather(BaseModel):
    """What the tool takes."""

    city: str


@pytest.fixture(scope="module")
def server(pairs: Pairs) -> Iterator[Scripted]:
    with scripted(pairs, AnswerFormat(tools="hermes", reasoning=True), COUNTS) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Scripted) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.served.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def create(client: OpenAI, **changes: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL], **changes)


def test_an_agent_goes_on_with_the_messages_it_was_given(server: Scripted, client: OpenAI) -> None:
    server.answer(f"{THOUGHT}Let me see.{CALLS}")
    (choice,) = create(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    cities = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
    assert cities == ["Köln", "x"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in choice.message.tool_calls]
    for said in (choice.message, choice.message.model_dump(), choice.message.to_dict()):
        server.answer("Rain.")
        messages = [*ASKED, said, *results]
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
        assert answer.choices[0].message.content == "Rain."
        assert server.prompt == "14"


def test_the_clients_own_stream_makes_the_whole_message(server: Scripted, client: OpenAI) -> None:
    text = f"{THOUGHT}Let me see.{CALLS}"
    server.answer(text)
    whole = create(client)
    server.answer(*text)
    with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    messages: list[Any] = [one.choices[0].message.to_dict() for one in (whole, final)]
    expected, message = messages
    for call in [*expected["tool_calls"], *message["tool_calls"]]:
        for name in ("id", "index"):
            call.pop(name, None)
        call["function"].pop("parsed_arguments", None)
    assert {name: message[name] for name in expected if name != "refusal"} == {
        name: value for name, value in expected.items() if name != "refusal"
    }
    assert final.choices[0].finish_reason == "tool_calls"


def test_arguments_are_parsed_into_the_callers_model(server: Scripted, client: OpenAI) -> None:
    tool = pydantic_function_tool(Weather, name="weather")
    server.answer(CALLS)
    answer = client.chat.completions.parse(model="tiny", messages=ASKED, tools=[tool])
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert [call.function.parsed_arguments for call in calls] == [Weather(city="Köln"), Weather(city="x")]
    server.answer(CALLS, finish_reason="length")
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=ASKED, tools=[tool])


def test_reasoning_comes_beside_the_content(server: Scripted, client: OpenAI) -> None:
    server.answer(*THOUGHT, *"Yes.")
    message = create(client).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "Yes.")
    deltas = [chunk.choices[0].delta for chunk in create(client, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = create(client, **asked)
    assert last.choices == []
    assert last.usage.completion_tokens_details.reasoning_tokens == 2


def test_headers_can_be_read(server: Scripted, client: OpenAI) -> None:
    server.answer("Yes.")
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=ASKED)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == "Yes."
    assert raw.headers["x-request-id"] == raw.request_id != ""
    named = client.with_options(default_headers={"X-Request-Id": "mine"})
    assert named.chat.completions.create(model="tiny", messages=ASKED)._request_id == "mine"
    with client.chat.completions.with_streaming_response.create(model="tiny", messages=ASKED, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[])
    assert refused.value.request_id


def test_many_streams_of_an_asynchronous_client_end_and_may_be_left(server: Scripted) -> None:
    server.answer(*"Yes, and no.")

    async def one(client: AsyncOpenAI, leave: bool) -> str:
        text = ""
        async with await client.chat.completions.create(model="tiny", messages=ASKED, stream=True) as stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if leave:
                    break
        return text

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=server.served.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index % 2 == 1) for index in range(16)))

    texts = asyncio.run(all_of_them())
    assert texts[::2] == ["Yes, and no."] * 8


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"description": "nameless"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"frequency_penalty": 1.5}, "frequency_penalty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
)
def test_what_is_refused_is_a_bad_request_that_names_the_field(
    client: OpenAI, changes: dict[str, Any], param: str
) -> None:
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": [TOOL], **changes}
    for stream in (False, True):
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(**asked, stream=stream)
        assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
        assert refused.value.code == ("context_length_exceeded" if param == "max_completion_tokens" else None)


def test_a_model_that_is_not_there_and_a_wrong_key_have_classes_of_their_own(pairs: Pairs, client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=ASKED)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    bundle = pairs.bundle(NAMES[1])
    with serve(lambda metrics: model(bundle, metrics), api_key="key") as locked:
        with connected(locked) as wrong, pytest.raises(AuthenticationError) as refused:
            wrong.chat.completions.create(model="tiny", messages=ASKED)
        assert refused.value.code == "invalid_api_key"


def connected(served: Served, **options: Any) -> OpenAI:
    return OpenAI(base_url=served.url, **{"api_key": "none", "max_retries": 0, **options})


def test_a_full_queue_a_body_too_long_and_a_server_that_ends_have_classes_of_their_own(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler: Any = FakeScheduler(room=0)
    scheduler.may_close.set()
    bundle = load(pairs.bundle(NAMES[1]), num_threads=1)
    with serve(lambda _: Model(bundle=bundle, scheduler=scheduler)) as served, connected(served) as client:
        with pytest.raises(RateLimitError) as full:
            client.completions.create(model="tiny", prompt="abc")
        assert float(full.value.response.headers["retry-after"]) >= 1
        monkeypatch.setattr("graphspec.runtime.server.app.MAX_BODY", 1000)
        with pytest.raises(APIStatusError) as long:
            client.completions.create(model="tiny", prompt="a" * 1000)
        assert long.value.status_code == 413
        served.serving.draining = True
        with pytest.raises(InternalServerError) as ending:
            client.completions.create(model="tiny", prompt="abc")
        assert (ending.value.status_code, ending.value.type) == (503, "unavailable_error")


def test_a_client_that_tries_again_gets_through_when_there_is_room(server: Scripted) -> None:
    server.answer("Yes.")
    server.scheduler.room = 0
    opening = threading.Timer(0.5, lambda: vars(server.scheduler).update(room=1000))
    opening.start()
    with connected(server.served, max_retries=3) as patient:
        assert patient.completions.create(model="tiny", prompt="abc").choices[0].text == "Yes."
    opening.join()
