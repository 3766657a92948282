"""Clients with thousands of prompts, and one who has a question."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from pairs import NAMES, Pairs
from prometheus_client.parser import text_string_to_metric_families
from served import Served, model, serve

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
