"""benchmarks/gpu.py, where there is no GPU: what it says, and its measurements on the engine that runs here."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from answers import PROMPTS
from gpu import why_no_gpu
from pairs import NAMES, Pairs

from graphspec import Generation
from graphspec.runtime.generate import LoadedBundle

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
NAME = NAMES[1]
UNLIKELY = 11
"""No favourite of the tiny pairs (pairs.py)."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "prompts", lambda _: [list(prompt) for prompt in PROMPTS[2:5]])
    monkeypatch.setattr(module, "TOKENS", 16)
    return module


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_fails(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith("no measurement: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_its_checks_and_times_hold_on_the_engine_of_this_machine(
    pairs: Pairs, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = pairs.pair(NAME)
    args = argparse.Namespace(model=str(pair.target), draft_model_path=str(pair.draft), rounds=4)
    monkeypatch.setattr(script, "idle_share", lambda *_: {"share": 0.01})
    report = script.measure(pairs.loaded(NAME), args, time.monotonic() + 100)
    assert report["lossless"] == {"equal": True, "differing": []}
    assert report["numerics"]["within"]
    assert 0 <= report["numerics"]["largest_gap"] < report["numerics"]["eager_bfloat16_error"]
    assert report["step_ms"].keys() == {"1", "2", "4", "8"}
    assert all(ms > 0 for row in report["step_ms"].values() for ms in row.values())
    assert {(row["batch"], row["width"]) for row in report["tokens_per_second"]} == {(1, 0), (1, 3), (8, 0), (8, 3)}
    built = {"model": "m", "architecture": NAME, "library": "l", "device_class": "sm90", "bundle_bytes": 1}
    script.print_table(
        json.loads(json.dumps(report)) | built | dict.fromkeys(("build_seconds", "load_seconds", "device_bytes"), 1)
    )
    printed = capsys.readouterr().out
    assert "lossless: holds\nnumerics: holds\n" in printed
    assert "device idle between steps, batch 1: 1.0%" in printed


def test_sections_that_there_is_no_time_for_are_named(script: ModuleType) -> None:
    class Loaded:
        _engine = None

    report = script.measure(Loaded(), argparse.Namespace(), time.monotonic() - 1)
    assert report == {"skipped": ["lossless", "numerics", "step_ms", "tokens_per_second", "idle"]}


def test_a_build_that_takes_too_long_is_ended_between_two_engines(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`main` builds a smaller bundle then: one row, no width but 0 and K."""
    asked = []

    def build(*, on_stage: Any, widths: list[int], max_batch_size: int, **_: object) -> Any:
        asked.append((widths, max_batch_size))
        on_stage("compiling")
        raise KeyboardInterrupt

    monkeypatch.setattr(script.graphspec, "build", build)
    monkeypatch.setattr(script, "why_no_gpu", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--build-minutes", "-1", "--json", str(tmp_path / "gpu.json")])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert asked == [([0, 1, 2, 4], 8), ([0, 4], 1)]


@pytest.mark.slow
def test_a_wrong_token_is_found(pairs: Pairs, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, loaded = pairs.pair(NAME), pairs.loaded(NAME)
    real = script.answers

    def wrong(asked: LoadedBundle, ids: list[list[int]], *rest: Any, **seed: int) -> list[Generation]:
        found: list[Generation] = real(asked, ids, *rest, **seed)
        if len(ids) > 1:  # in a batch only
            found[0] = replace(found[0], token_ids=(*found[0].token_ids[:-1], UNLIKELY))
        return found

    monkeypatch.setattr(script, "answers", wrong)
    found = script.losslessness(loaded)
    assert not found["equal"]
    assert {"temperature": 0.0, "width": 2, "prompt": 0, "from_token": 15} in found["differing"]
    assert not script.numerics(loaded, str(pair.target), str(pair.draft))["within"]
