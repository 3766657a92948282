"""Throughput and latency of `graphspec run`, by the number of clients that stream from it at once.

    python benchmarks/serving.py BUNDLE [--clients 1,2,4,8] [--seconds 20] [--tokens 96] [--width W] [--json out.json]

Starts the server on a free port. Every client sends one chat after another (greedy, `tokens` tokens each, never the
same prompt twice in a row) until the time is over. Clients and server share this machine's cores. Printed for each
number of clients:

    tok/s       tokens of all clients, a second
    TTFT, ITL   milliseconds to the first piece, and between pieces by the tokens in them: median / 95th percentile
    tok/step    tokens that a row commits in a step
    step        milliseconds from step to step, prompts' share among them
    host        share of that time in which the device had nothing to do
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

QUESTIONS = (
    "Write an HTML table with three columns and five rows, with the headings Name, Age and City.",
    "Explain how the water cycle works.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the pros and cons of electric cars?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it line by line.",
    "List the planets of the solar system with one fact about each.",
    "Summarise the plot of Romeo and Juliet.",
    "How do I make bread at home? Give me the steps.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Explain step by step.",
    "Write a polite email that asks for a day off.",
    "What is the difference between a list and a tuple in Python?",
    "Give me five tips to sleep better.",
)
READY = re.compile(r"Server ready on http://[^:]+:(\d+)")


@dataclass(slots=True)
class Measured:
    """What the clients saw, and what the server counted meanwhile."""

    clients: int
    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to each answer's first piece."""
    between: list[float] = field(default_factory=list)
    """Seconds from piece to piece, divided by the tokens in the piece."""
    steps: float = 0.0
    device_seconds: float = 0.0
    tokens_per_step: float = 1.0

    def line(self) -> str:
        step = self.seconds / self.steps * 1e3 if self.steps else 0.0
        return (
            f"{self.clients:7} {self.tokens / self.seconds:8.1f} {_both(self.first):>16} {_both(self.between):>16} "
            f"{self.tokens_per_step:9.2f} {step:8.1f} {1 - self.device_seconds / self.seconds:7.1%}"
        )


def main() -> int:
    """Measures each number of clients in turn."""
    args = _arguments()
    results = []
    with server(args) as address:
        print(f"{'clients':>7} {'tok/s':>8} {'TTFT ms':>16} {'ITL ms':>16} {'tok/step':>9} {'step ms':>8} {'host':>7}")
        load(address, 1, 3.0, args.tokens)  # the first requests pay for what is set up lazily
        for clients in map(int, args.clients.split(",")):
            measured = load(address, clients, args.seconds, args.tokens)
            print(measured.line(), flush=True)
            results.append(asdict(measured))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """`graphspec run` while it is needed → its address."""
    largest = max(map(int, args.clients.split(",")))
    command = [sys.executable, "-m", "graphspec", "run", args.bundle, "--host", "127.0.0.1", "--port", "0"]
    command += ["--max-batch-size", str(largest)]
    command += ["--width", str(args.width)] if args.width is not None else []
    command += ["--no-overlap"] if args.no_overlap else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := READY.search(line):
                yield f"127.0.0.1:{found[1]}"
                return
        raise SystemExit("the server did not start: " + " ".join(command) + "\n" + "".join(said))
    finally:
        process.terminate()
        process.wait()


def load(address: str, clients: int, seconds: float, tokens: int) -> Measured:
    """`clients` at once, for `seconds`; what is under way then is dropped, and its pieces so far count."""
    measured, numbers, over = Measured(clients=clients), count(), threading.Event()
    failures: list[BaseException] = []

    def client() -> None:
        try:
            while not over.is_set():
                _chat(address, next(numbers), tokens, measured, over)
        except BaseException as error:
            failures.append(error)

    before = counters(address)
    begun = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    measured.seconds = time.perf_counter() - begun
    after = counters(address)
    over.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    grown = {name: after[name] - before[name] for name in after}
    measured.steps, measured.device_seconds = grown["steps"], grown["device_seconds"]
    if passes := grown["spec_decode_num_drafts"]:
        measured.tokens_per_step = 1 + grown["spec_decode_num_accepted_tokens"] / passes
    return measured


def _chat(address: str, number: int, tokens: int, measured: Measured, over: threading.Event) -> None:
    """One answer, streamed."""
    # A number of its own: no prompt is in the cache already, but for what the template begins with.
    body = {
        "messages": [{"role": "user", "content": f"{number}. {QUESTIONS[number % len(QUESTIONS)]}"}],
        "stream": True,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    newest, seen = time.perf_counter(), 0
    with (
        closing(http.client.HTTPConnection(address)) as connection,
        closing(_posted(connection, body)) as response,
    ):
        for line in response:
            if over.is_set():
                break
            if not line.startswith(b"data: {"):
                continue
            total = json.loads(line[6:])["usage"]["completion_tokens"]
            if total == seen:
                continue
            now = time.perf_counter()
            if seen:
                measured.between.append((now - newest) / (total - seen))
            else:
                measured.first.append(now - newest)
            measured.tokens += total - seen
            newest, seen = now, total


def _posted(connection: http.client.HTTPConnection, body: object) -> http.client.HTTPResponse:
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        with response:
            raise SystemExit(f"the server said {response.status}: {response.read().decode()}")
    return response


def counters(address: str) -> dict[str, float]:
    """The server's own, by name."""
    with closing(http.client.HTTPConnection(address)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    names = ("steps", "device_seconds", "spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    found = {name: re.search(rf"^graphspec:{name}_total (\S+)", text, re.MULTILINE) for name in names}
    return {name: float(match[1]) if match else 0.0 for name, match in found.items()}


def _both(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "-"
    return f"{statistics.median(seconds) * 1e3:.1f} / {statistics.quantiles(seconds, n=20)[-1] * 1e3:.1f}"


def _arguments(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--width", type=int)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
