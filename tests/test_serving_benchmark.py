"""benchmarks/serving.py: its figures are those of the server that it asks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pairs import NAMES, Pairs
from served import model, serve

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "serving.py"
pytestmark = pytest.mark.slow


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serving_benchmark", module)  # dataclasses look for it
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "QUESTIONS", ("ab", "xyz"))
    return module


def test_a_line_for_each_number_of_clients(pairs: Pairs, script: ModuleType) -> None:
    with serve(lambda metrics: model(pairs.bundle(NAMES[1]), metrics)) as served:
        for clients in (1, 3):
            measured = script.load(f"127.0.0.1:{served.port}", clients, 1.5, 8)
            assert measured.line().split()[0] == str(clients)
            assert measured.tokens > 0
            assert 1 < measured.tokens_per_step <= 4
            assert 0 < measured.device_seconds < measured.seconds
            assert len(measured.first) >= clients
            # A step commits no more than the block in each of its rows.
            assert measured.tokens <= (measured.steps + clients) * clients * 4


def test_what_the_server_refuses_ends_it(pairs: Pairs, script: ModuleType) -> None:
    with (
        serve(lambda metrics: model(pairs.bundle(NAMES[1]), metrics)) as served,
        pytest.raises(SystemExit, match=r"the server said 400: .*max_tokens"),
    ):
        script.load(f"127.0.0.1:{served.port}", 2, 5.0, 10**6)
