"""What real clients send: lm-eval, vLLM's and guidellm's benchmarks in their own words, and many of them at once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from pairs import NAMES, Pairs
from served import Served, model, serve

from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(pairs: Pairs) -> Iterator[Served]:
    bundle = pairs.bundle(NAMES[1])
    with serve(lambda metrics: model(bundle, metrics)) as running:
        yield running


@pytest.fixture(scope="module")
def offline(pairs: Pairs) -> LoadedBundle:
    return pairs.loaded(NAMES[1])


def test_lm_evals_batches_of_token_ids(served: Served, offline: LoadedBundle) -> None:
    """The payload and the parsing of its local-completions model, for generate_until."""
    prompts = [offline.encode(text) for text in ("abc", "xyz", "ab", "q")]
    payload = {
        "prompt": prompts,
        "model": "tiny",
        "max_tokens": 16,
        "temperature": 0,
        "stop": ["\n\n", "Question:", "<|endoftext|>"],
        "seed": 1234,
    }
    outputs = served.post(TEXT, payload, **{"Authorization": "Bearer ", "Content-Type": "application/json"}).json
    texts: list[str | None] = [None] * len(outputs["choices"])
    for choice in outputs["choices"]:
        texts[choice["index"]] = choice["text"]
    expected = offline.generate(prompts, SamplingParams(max_new_tokens=16, seed=1234))
    assert texts == [one.text for one in expected]


def test_lm_evals_remote_tokenizer(served: Served, offline: LoadedBundle) -> None:
    assert "eos_token" in served.get("/tokenizer_info").json
    ids = served.post("/tokenize", {"prompt": "abc", "add_special_tokens": False}).json["tokens"]
    assert ids == offline.encode("abc")
    assert served.post("/detokenize", {"tokens": ids}).json["prompt"] == "abc"


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_vllms_benchmark(served: Served, path: str) -> None:
    """Its payloads, and its reading of the events: tokens counted from the chunk without choices alone."""
    content = {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}
    limit = {"max_completion_tokens": 24} if path == CHAT else {"max_tokens": 24}
    payload: dict[str, Any] = {
        "model": "tiny",
        **(content if path == CHAT else {"prompt": "abc"}),
        **limit,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    num_events, text, usage = 0, "", None
    *events, done = served.post(path, payload).events
    assert done == "[DONE]"
    assert events[0]["choices"]  # the time to the first token is that of the first event with choices
    for event in events:
        if choices := event.get("choices"):
            assert usage is None  # and what comes after the usage would count as another token
            num_events += 1
            text += (choices[0]["delta"].get("content") if path == CHAT else choices[0]["text"]) or ""
        elif event.get("usage"):
            usage = event["usage"]["completion_tokens"]
    assert usage == 24 == len(text)
    assert num_events > 2


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_guidellm(served: Served, path: str) -> None:
    """Of a fixed length; every event says how many tokens there are, the last one without choices."""
    assert served.get("/health").status == 200
    name = served.get("/v1/models").json["data"][0]["id"]
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}], "max_completion_tokens": 20}
    payload = {
        **(chat if path == CHAT else {"prompt": "abc", "max_tokens": 20}),
        "model": name,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stop": None,
        "ignore_eos": True,
    }
    events = served.post(path, payload).events[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert [bool(event["choices"]) for event in events] == [True] * (len(events) - 1) + [False]


@dataclass(frozen=True, slots=True)
class Ask:
    """One of many requests, and what should come of it."""

    kind: str
    body: dict[str, Any]
    params: SamplingParams


def drawn(seed: int) -> Ask:
    draw = random.Random(seed)
    kind = draw.choice(["whole", "whole", "stream", "stream", "leaves", "wrong"])
    prompt = "".join(draw.choices("abcxyz", k=draw.randint(1, 30)))
    stop = draw.choice([[], [], draw.sample("abcdefghABCDEFGH", 3)])
    options: dict[str, Any] = {"temperature": draw.choice([0.0, 0.7, 1.0]), "seed": seed, "top_k": draw.choice([0, 20])}
    count = draw.randint(0, 40)
    body = {"prompt": prompt, "max_tokens": count, "stop": stop, "speculative": draw.random() < 0.8, **options}
    return Ask(kind, body, SamplingParams(max_new_tokens=count, stop=tuple(stop), **options))


def outcome(served: Served, ask: Ask) -> str | int | None:
    """The text, or the status of a refusal; None of one that left."""
    if ask.kind == "wrong":
        return served.post(TEXT, {**ask.body, "top_p": 7}).status
    if ask.kind == "leaves":
        with served.hanging(TEXT, {**ask.body, "stream": True, "max_tokens": 90}) as connection:
            connection.recv(300)
        return None
    if ask.kind == "stream":
        events = served.post(TEXT, {**ask.body, "stream": True}).events
        return "".join(event["choices"][0]["text"] for event in events[:-1])
    text: str = served.post(TEXT, ask.body).json["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_many_at_once_get_what_each_gets_alone(served: Served, offline: LoadedBundle) -> None:
    asks = [drawn(seed) for seed in range(192)]
    with ThreadPoolExecutor(64) as clients:
        found = list(clients.map(lambda ask: outcome(served, ask), asks))
    for ask, got in zip(asks, found, strict=True):
        if ask.kind in ("whole", "stream"):
            (alone,) = offline.generate([offline.encode(ask.body["prompt"])], ask.params)
            assert got == alone.text, json.dumps(ask.body)
        else:
            assert got == (400 if ask.kind == "wrong" else None)
    scheduler = served.serving.model.scheduler if served.serving.model else None
    assert scheduler is not None
    end = time.monotonic() + 10
    while scheduler.num_running or scheduler.num_waiting:  # those that left
        assert time.monotonic() < end
        time.sleep(0.01)
