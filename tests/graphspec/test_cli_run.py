"""`graphspec run`: what it says, and how signals end it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

READY = r"Server ready on http://127\.0\.0\.1:(\d+) \(Press CTRL\+C to quit\)\n"


@contextmanager
def running(bundle: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its URL, and the lines before that it is ready."""
    words = [sys.executable, "-m", "graphspec", "run", str(bundle), "--host", "127.0.0.1", "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = list[str]()
            while (ready := re.fullmatch(READY, line := process.stdout.readline())) is None:
                assert line, process.communicate()
                lines.append(line)
            yield process, f"http://127.0.0.1:{ready[1]}", lines
        finally:
            process.kill()


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.slow
def test_it_says_what_it_serves_answers_and_ends_at_sigterm(bundle: Path) -> None:
    options = [
        "--served-model-name",
        "tiny",
        "--served-model-name",
        "other",
        "--max-batch-size",
        "2",
        "--width",
        "1:3,2:0",
    ]
    options += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice"]
    with running(bundle, *options) as (process, url, banner):
        told = dict(line.split(maxsplit=1) for line in banner)
        assert told["model"] == "tiny, other\n"
        assert told["architecture"] == "UnifiedNgramLlama3ForCausalLM\n"
        assert told["backend"].startswith("onnxruntime ")
        assert told["widths"] == "0, 3; 1:3,2:0 in use\n"
        assert told["capacity"] == "2 requests of 96 tokens\n"
        assert told["parsers"] == "tool calls: hermes; reasoning: think\n"
        for name in ("tiny", "other"):
            answer = post(f"{url}/v1/completions", {"model": name, "prompt": "abcabc", "max_tokens": 20, "seed": 1})
            assert answer["model"] == name
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    steps = [line for line in err.splitlines() if not line.startswith("[")]
    assert 1 <= len(steps) <= 2, err  # short requests share one
    for line in steps:
        assert re.match(
            r"\d+ steps, \d+ toks, [\d.]+ toks/s \| Running: 0 reqs, Pending: 0 reqs \| Draft Tokens: ", line
        )
        assert re.search(r" / 3 toks \(accepted drafts/step; .* incl bonus\), Per-Pos: \[p0=\d+%, p1=.*\] \|$", line)


@pytest.mark.slow
def test_sigterm_lets_a_running_answer_end_and_ctrl_c_twice_does_not(bundle: Path) -> None:
    body = {"prompt": "abc", "stream": True, "max_tokens": 90}
    with running(bundle, "--no-overlap") as (process, url, _):
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out in ("", "Draining 1 requests for up to 30 s (CTRL+C again ends them)\n")
    with running(bundle) as (process, url, _):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


CTRL_C_WHILE_IT_LOADS = """
import atexit, os, signal, sys, threading
from graphspec.cli import main
from graphspec.runtime import generate

def load(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

generate.load = load
atexit.register(os.abort)  # as a library does that works in a thread while the interpreter ends
sys.exit(main(["run", "bundle", "--host", "127.0.0.1", "--port", "0"]))
"""


def test_ctrl_c_while_it_loads_ends_the_process_before_the_libraries_that_work_for_it_abort() -> None:
    words = [sys.executable, "-c", CTRL_C_WHILE_IT_LOADS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
def test_a_request_has_no_more_time_than_the_server_gives(bundle: Path) -> None:
    def why_it_ended(url: str) -> Any:
        try:
            answer = post(f"{url}/v1/completions", {"prompt": "abcabc", "max_tokens": 80, "ignore_eos": True})
        except urllib.error.HTTPError as error:  # it had not begun
            return json.load(error)["error"]["code"]
        return answer["choices"][0]["stop_reason"]

    with running(bundle, "--request-timeout", "0.001") as (_, url, _):
        assert [why_it_ended(url) for _ in range(3)] == ["timeout"] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--width", "2"], "width 2 is not in this bundle"),
        (["--width", "1:3,2:2"], "width 2 of the schedule 1:3,2:2 is not in this bundle; it was built for 0, 3"),
        (["--max-batch-size", "1000"], "1000 requests in a step: the bundle was built for 1 to 2"),
        (["--require-signature", "missing.pub"], "missing.pub"),
        (["--host", "nowhere.invalid"], "use another --host"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0: Cannot assign requested address; use another --host"),
        (["--threads", "1000"], "1000 threads: 1 to "),
        (["--tool-call-parser", "mistral"], "'mistral': use hermes, llama3_json, pythonic or none"),
        (["--reasoning-parser", "granite"], "'granite'"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_line(bundle: Path, run: Command, options: list[str], said: str) -> None:
    result = run("run", bundle, "--port", "0", *options)
    assert result.status == 1
    (line,) = result.errors
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize("option", ["--threads", "--max-batch-size", "--max-queue-size"])
def test_none_at_all_is_a_mistake_of_usage(bundle: Path, run: Command, option: str) -> None:
    result = run("run", bundle, option, "0")
    assert result.status == 2
    assert option in result.errors[-1]


@pytest.mark.parametrize("option", ["--api-key", "--served-model-name"])
def test_a_variable_that_is_not_set_is_no_name_and_no_key(bundle: Path, run: Command, option: str) -> None:
    result = run("run", bundle, option, "")
    assert (result.status, result.errors) == (2, [f"error: {option} is empty: give one, or leave it out"])


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ([], True),
        (["--host", "0.0.0.0"], True),
        (["--host", "localhost"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "::1"], False),
        (["--api-key", "secret"], False),
    ],
)
def test_a_server_that_is_open_to_all_says_so(
    tmp_path: Path, run: Command, caplog: pytest.LogCaptureFixture, options: list[str], warned: bool
) -> None:
    run("run", tmp_path / "nothing", "--port", "0", *options)
    assert any("without --api-key" in line for line in caplog.messages) == warned


def test_a_folder_that_is_no_bundle_is_told_in_a_line(tmp_path: Path, run: Command) -> None:
    result = run("run", tmp_path / "nothing", "--port", "0")
    (line,) = result.errors
    assert (result.status, result.out) == (1, "")
    assert "is not a bundle" in line
