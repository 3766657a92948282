"""Who waits how long: clients with thousands of prompts, one who has a question, and answers that take too long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from pairs import NAMES, Pairs
from prometheus_client.parser import text_string_to_metric_families
from served import Served, model, serve

from graphspec.runtime.engine import Pending
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine

pytestmark = pytest.mark.slow

TEXT = "/v1/completions"
ROWS = 8
PROMPTS = 2048
LENGTH = 16


@pytest.fixture
def served(pairs: Pairs) -> Iterator[Served]:
    bundle = pairs.bundle(NAMES[3])
    with serve(lambda metrics: model(bundle, metrics)) as running:
        yield running


def metric(served: Served, name: str) -> float:
    """Over all labels."""
    families = text_string_to_metric_families(served.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == f"graphspec:{name}")


def test_a_question_waits_for_no_batch_of_prompts(served: Served) -> None:
    """Three batches of 2048 prompts have every row, and 88 prompts in the queue; nearly all of those come later."""
    body = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
    with ExitStack() as stack:
        for number in range(3):
            prompts = [[number, i % 128] for i in range(PROMPTS)]
            stack.enter_context(served.hanging(TEXT, body | {"prompt": prompts}))
        end = time.monotonic() + 60
        while metric(served, "num_requests_waiting") < 3 * 32 - ROWS - 4:
            assert time.monotonic() < end
        for _ in range(5):
            before = metric(served, "request_success_total")
            assert served.post(TEXT, body | {"prompt": [5, 6, 7]}).status == 200
            # The rows' answers that it waited for, those that ended while it ran, and as many again for the counting.
            assert metric(served, "request_success_total") - before <= 4 * ROWS
        assert metric(served, "request_success_total") < 3 * PROMPTS / 2
    end = time.monotonic() + 60
    while metric(served, "num_requests_running") or metric(served, "num_requests_waiting"):
        assert time.monotonic() < end


@pytest.fixture
def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A step takes 50 ms."""
    step = OnnxRuntimeEngine.step

    def slowed(engine: OnnxRuntimeEngine, slots: Sequence[int], width: int, **options: Any) -> Pending:
        time.sleep(0.05)
        return step(engine, slots, width, **options)

    monkeypatch.setattr(OnnxRuntimeEngine, "step", slowed)
    return served


def test_an_answer_ends_at_its_deadline_with_the_text_there_is(slow: Served) -> None:
    body = {"prompt": "abc", "temperature": 1.0, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    (whole,) = slow.post(TEXT, body | {"max_tokens": 30}).json["choices"]
    (cut,) = slow.post(TEXT, body | {"max_tokens": 120, "timeout": 0.6}).json["choices"]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "timeout")
    count = len(cut["token_ids"])
    assert 0 < count < 120
    assert cut["token_ids"][:30] == whole["token_ids"][:count]
    assert cut["text"] == whole["text"][:count] or count > 30
    *_, last, done = slow.post(TEXT, body | {"max_tokens": 120, "timeout": 0.6, "stream": True}).events
    assert (last["choices"][0]["stop_reason"], done) == ("timeout", "[DONE]")


def test_an_answer_that_had_no_row_until_its_deadline_is_a_503(slow: Served) -> None:
    body = {"prompt": ["a"] * ROWS, "max_tokens": 120, "ignore_eos": True}
    with slow.hanging(TEXT, body):
        end = time.monotonic() + 60
        while metric(slow, "num_requests_running") < ROWS:
            assert time.monotonic() < end
        reply = slow.post(TEXT, {"prompt": "abc", "timeout": 0.2})
        assert (reply.status, reply.error["code"], reply.error["type"]) == (503, "timeout", "unavailable_error")
        assert int(reply.headers["retry-after"]) >= 1
        events = slow.post(TEXT, {"prompt": "abc", "timeout": 0.2, "stream": True}).events
        assert [event["error"]["code"] for event in events] == ["timeout"]
