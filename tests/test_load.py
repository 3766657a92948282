"""Load: 64 clients at once over HTTP, some of whom misbehave. LOAD_SECONDS=60 makes the run as long as that."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from pairs import NAMES, Pairs

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "load.py"
SECONDS = float(os.environ.get("LOAD_SECONDS", "15"))
MOST_GROWTH = 16.0
"""MiB from a third of the run to its end; the server has about 110."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the server's memory is read from /proc"),
]


@pytest.fixture
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("load_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their modules up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_answer_is_right_and_nothing_leaks(pairs: Pairs, script: ModuleType) -> None:
    report = asyncio.run(script.measure(pairs.bundle(NAMES[1]), seconds=SECONDS, clients=64, rows=8, queue=48, seed=1))
    assert report["wrong"] == []
    assert report["all_rows_free"]
    assert report["memory_grew_mib"] < MOST_GROWTH, report
    often = {kind for kind, count in report["outcomes"].items() if count >= 5}
    assert often >= {"streamed", "whole", "hung up", "malformed", "queue full"}, report


def test_a_wrong_answer_would_be_noticed(pairs: Pairs, script: ModuleType) -> None:
    with script.served(pairs.bundle(NAMES[1]), "--threads", "1") as server:
        (wish,) = script.wishes(pairs.loaded(NAMES[1]), 1, seed=0)
        answer = wish.answers[0]
        other = replace(answer, token_ids=(*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % 128))
        for answers, right in ((wish.answers, True), ((other, *wish.answers[1:]), False)):
            crowd = script.Crowd(server.port, [replace(wish, answers=answers)])
            asyncio.run(crowd.come(4, 0.5, seed=0))
            assert bool(crowd.totals.wrong) != right
