"""Many clients at once, some of whom misbehave, against a server of its own; every answer is compared.

    python benchmarks/load.py BUNDLE [--seconds 60] [--clients 64] [--max-batch-size 8] [--seed 0]

Clients draw requests from a pool whose answers were computed before, without a server. They stream or wait, hang up in
the middle, send what is no request, and give too little time. Prints one JSON object: counts by outcome, answers that
were wrong, latencies, and the server's memory. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphspec.runtime.answer import Generation
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.runtime.sampling import SamplingParams

TEXT = "/v1/completions"
MALFORMED: tuple[tuple[bytes, int, str | None], ...] = (
    (b"{", 400, None),
    (b"[]", 400, None),
    (b"{}", 400, "prompt"),
    (b'{"prompt": []}', 400, "prompt"),
    (b'{"prompt": "a", "temperature": -1}', 400, "temperature"),
    (b'{"prompt": "a", "max_tokens": 1000000}', 400, "max_tokens"),
    (b'{"prompt": "a", "stop": [1]}', 400, "stop"),
    (b'{"prompt": [99999999]}', 400, "prompt"),
    (b'{"prompt": "a", "n": 0}', 400, "n"),
    (b'{"prompt": "a", "presence_penalty": 1}', 400, "presence_penalty"),
    (b'{"prompt": "a", "timeout": 0}', 400, "timeout"),
    (b'{"prompt": "a", "model": "another"}', 404, "model"),
)
"""Bodies, and the status and field that they are told."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A request that is asked for again and again, and what it is answered whatever else runs."""

    body: dict[str, Any]
    answers: tuple[Generation, ...]
    """One for each choice."""


@dataclass(kw_only=True)
class Totals:
    """What all clients together saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    """Seconds from sending to the first event, of whole streams."""
    per_token: list[float] = field(default_factory=list)
    """Seconds for each token after it."""

    def report(self, seconds: float) -> dict[str, Any]:
        """In milliseconds, where it says so."""
        times = {"ttft_ms": self.first_token, "per_token_ms": self.per_token}
        return {
            "seconds": round(seconds, 2),
            "outcomes": dict(sorted(self.outcomes.items())),
            "tokens_per_second": round(self.tokens / seconds, 1),
            **{name: _quantiles(values) for name, values in times.items()},
            "wrong": self.wrong,
        }


def wishes(bundle: LoadedBundle, count: int, seed: int, *, longest: int = 48) -> list[Wish]:
    """Answered offline. Half of them stop at something that their own text holds."""
    draw, vocabulary = random.Random(seed), bundle.manifest.pair.target.vocab_size
    most = min(longest, bundle.manifest.max_length // 2)
    found = []
    for number in range(count):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.choice([1, 2, 5, 13, most]))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.3]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(2**32),
            max_new_tokens=draw.choice([1, 2, 7, most // 2, most]),
            ignore_eos=draw.random() < 0.5,
        )
        (whole,) = bundle.generate([prompt], params)
        if number % 4 == 0 and len(whole.text) > 2:
            at = draw.randrange(len(whole.text) - 1)
            params = replace(params, stop=(whole.text[at : at + draw.randint(1, 6)],))
        elif number % 4 == 1:
            params = replace(params, stop_token_ids=(draw.choice(whole.token_ids),))
        found.append(_wish(bundle, prompt, params, choices=draw.choice([1, 1, 1, 2]), speculative=draw.random() < 0.8))
    return found


def _wish(
    bundle: LoadedBundle, prompt: Sequence[int], params: SamplingParams, *, choices: int, speculative: bool
) -> Wish:
    assert params.seed is not None
    seeds = [params.seed + choice for choice in range(choices)]
    answers = bundle.generate([prompt] * choices, [replace(params, seed=seed) for seed in seeds])
    body = {
        "prompt": list(prompt),
        "n": choices,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "max_tokens": params.max_new_tokens,
        "ignore_eos": params.ignore_eos,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "speculative": speculative,
        "return_token_ids": True,
    }
    return Wish(body=body, answers=tuple(answers))


@dataclass
class Crowd:
    """Clients of one server."""

    port: int
    pool: Sequence[Wish]
    totals: Totals = field(default_factory=Totals)

    async def come(self, number: int, seconds: float, seed: int) -> None:
        """So many clients at once, each with one request after the other."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(random.Random(seed * 1000 + i), end) for i in range(number)))

    async def _client(self, draw: random.Random, end: float) -> None:
        while time.monotonic() < end:
            kind, wish, stream = draw.random(), draw.choice(self.pool), draw.random() < 0.8
            try:
                if kind < 0.1:
                    await self._malformed(*draw.choice(MALFORMED))
                elif kind < 0.25:
                    await self._hangs_up(
                        draw.choice(self.pool), draw.choice([0, 0, 1, 2, 5]), stream=draw.random() < 0.8
                    )
                elif kind < 0.3:
                    await self._in_a_hurry(wish, draw.choice([0.001, 0.1, 0.7, 1.0]))
                else:
                    await self._asks(wish, stream=stream)
            except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
                self._wrong(f"{type(error).__name__}: {error}")

    async def _malformed(self, body: bytes, status: int, param: str | None) -> None:
        async with _Exchange(self.port, body) as exchange:
            error = json.loads(await exchange.rest())["error"]
        self.totals.outcomes["malformed"] += 1
        if (exchange.status, error["param"]) != (status, param):
            self._wrong(f"{body!r} was told {exchange.status} {error}")

    async def _hangs_up(self, wish: Wish, events: int, *, stream: bool) -> None:
        body = wish.body | {"stream": stream}
        async with _Exchange(self.port, json.dumps(body).encode()) as exchange:
            if not stream:
                await asyncio.sleep(0.01 * events)
            elif events and await exchange.head() == 200:
                async for _ in exchange.events():
                    events -= 1
                    if events == 0:
                        break
        self.totals.outcomes["hung up"] += 1

    async def _in_a_hurry(self, wish: Wish, timeout: float) -> None:
        body = wish.body | {"timeout": timeout}
        async with _Exchange(self.port, json.dumps(body).encode()) as exchange:
            reply = json.loads(await exchange.rest())
        if exchange.status == 200:
            for choice in reply["choices"]:
                answer = wish.answers[choice["index"]]
                ids, late = tuple(choice["token_ids"]), choice["stop_reason"] == "timeout"
                if ids != (answer.token_ids[: len(ids)] if late else answer.token_ids):
                    self._wrong(f"{body}: {choice}, for {answer.text!r}")
            self.totals.outcomes["in a hurry, answered"] += 1
        elif exchange.status in (429, 503):
            self.totals.outcomes["in a hurry, refused"] += 1
        else:
            self._wrong(f"{body}: {exchange.status} {reply}")

    async def _asks(self, wish: Wish, *, stream: bool) -> None:
        body = wish.body | {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        started = time.monotonic()
        async with _Exchange(self.port, json.dumps(body).encode()) as exchange:
            status = await exchange.head()
            if status == 429:
                self.totals.outcomes["queue full"] += 1
                await exchange.rest()
                await asyncio.sleep(0.05)  # a person would wait as long as Retry-After says
                return
            if status != 200:
                self._wrong(f"{body}: {status} {(await exchange.rest()).decode()}")
                return
            choices, usage = await (self._streamed(exchange, started) if stream else _whole(exchange))
        self.totals.outcomes["streamed" if stream else "whole"] += 1
        self.totals.tokens += usage["completion_tokens"]
        expected = {
            index: [answer.text, list(answer.token_ids), answer.finish_reason]
            for index, answer in enumerate(wish.answers)
        }
        if choices != expected:
            self._wrong(f"{body}: {choices}, not {expected}")
        if usage["completion_tokens"] != sum(len(answer.token_ids) for answer in wish.answers):
            self._wrong(f"{body}: {usage}")

    async def _streamed(self, exchange: _Exchange, started: float) -> tuple[dict[int, list[Any]], dict[str, Any]]:
        choices, usage, times = dict[int, list[Any]](), dict[str, Any](), [time.monotonic()]
        async for data in exchange.events():
            if data == b"[DONE]":
                break
            event = json.loads(data)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                times.append(time.monotonic())
                so_far = choices.setdefault(choice["index"], ["", [], None])
                so_far[0] += choice["text"]
                so_far[1] += choice.get("token_ids") or []
                so_far[2] = choice["finish_reason"] or so_far[2]
        if len(times) > 1:
            self.totals.first_token.append(times[1] - started)
        if (after := usage["completion_tokens"] - 1) > 0 and len(choices) == 1:
            self.totals.per_token.append((times[-1] - times[1]) / after)
        return choices, usage

    def _wrong(self, what: str) -> None:
        self.totals.outcomes["wrong"] += 1
        if len(self.totals.wrong) < 5:
            self.totals.wrong.append(what[:1000])


async def _whole(exchange: _Exchange) -> tuple[dict[int, list[Any]], dict[str, Any]]:
    reply = json.loads(await exchange.rest())
    choices = {one["index"]: [one["text"], one["token_ids"], one["finish_reason"]] for one in reply["choices"]}
    return choices, reply["usage"]


class _Exchange:
    """One request on a connection of its own; HTTP/1.0, so that a body is what comes until the end."""

    def __init__(self, port: int, body: bytes, path: str = TEXT) -> None:
        self._port, self._body, self._path = port, body, path
        self.status = 0

    async def __aenter__(self) -> _Exchange:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        method = "POST" if self._body else "GET"
        self._writer.write(f"{method} {self._path} HTTP/1.0\r\nContent-Length: {len(self._body)}\r\n\r\n".encode())
        self._writer.write(self._body)
        await self._writer.drain()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def rest(self) -> bytes:
        """Of the reply."""
        await self.head()
        return await self._reader.read()

    async def events(self) -> AsyncIterator[bytes]:
        """Of a stream, each event's data."""
        await self.head()
        while event := await self._reader.readline():
            if event != b"\n":
                yield event.removeprefix(b"data: ").rstrip(b"\n")

    async def head(self) -> int:
        """The status."""
        if not self.status:
            head = await self._reader.readuntil(b"\r\n\r\n")
            self.status = int(head.split()[1])
        return self.status


@dataclass(frozen=True)
class Server:
    """`graphspec run` in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    @property
    def memory(self) -> int:
        """Bytes that it has in RAM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    async def metric(self, name: str) -> float:
        """One of its gauges."""
        async with _Exchange(self.port, b"", "/metrics") as exchange:
            text = (await exchange.rest()).decode()
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"graphspec:{name} ")))

    async def settled(self, running: int, *, seconds: float = 10.0) -> bool:
        """Whether so many requests run in time, and none waits."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if await self.metric("num_requests_running") == running and not await self.metric("num_requests_waiting"):
                return True
            await asyncio.sleep(0.02)
        return False


@contextmanager
def served(bundle: Path, *options: str) -> Iterator[Server]:
    """Until the block ends."""
    words = [sys.executable, "-m", "graphspec", "run", str(bundle), "--host", "127.0.0.1", "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if ready := re.search(r"ready on http://127\.0\.0\.1:(\d+)", line):
                    yield Server(process, int(ready[1]))
                    break
            else:
                raise RuntimeError(f"the server ended with {process.wait()}")
        finally:
            process.terminate()
            process.communicate()


async def rows_are_free(server: Server, rows: int, tokens: int) -> bool:
    """Whether nothing runs, and then as many answers as there are rows run at once; of so many tokens each."""
    body = json.dumps({"prompt": [1], "max_tokens": tokens, "ignore_eos": True, "n": rows}).encode()
    for _ in range(10):
        if not await server.settled(0) or await server.metric("kv_cache_usage_perc"):
            return False
        async with _Exchange(server.port, body):
            if await server.settled(rows, seconds=1.0):
                break
    else:
        return False
    return await server.settled(0)


async def measure(bundle: Path, *, seconds: float, clients: int, rows: int, queue: int, seed: int) -> dict[str, Any]:
    """Starts a server, loads it, and says what came of it. Memory is compared from a third of the time on."""
    with load(bundle, max_batch_size=rows, num_threads=1) as loaded:
        pool = wishes(loaded, 48, seed)
        room = loaded.manifest.max_length - 1
    options = ("--max-batch-size", str(rows), "--max-queue-size", str(queue), "--threads", "1")
    with served(bundle, *options) as server:
        warming, crowd = Crowd(server.port, pool), Crowd(server.port, pool)
        await warming.come(clients, seconds / 3, seed)
        await server.settled(0)
        before = server.memory
        await crowd.come(clients, 2 * seconds / 3, seed + 1)
        free = await rows_are_free(server, rows, min(room, 200))
        crowd.totals.wrong += warming.totals.wrong
        return crowd.totals.report(2 * seconds / 3) | {
            "warming": dict(sorted(warming.totals.outcomes.items())),
            "all_rows_free": free,
            "memory_mib": round(server.memory / 2**20, 1),
            "memory_grew_mib": round((server.memory - before) / 2**20, 1),
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {f"p{at}": round(1000 * cuts[at - 1], 2) for at in (50, 95, 99)}


def main() -> None:
    """Prints what `measure` says; fails if an answer was wrong or a row is not free."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-batch-size", dest="rows", type=int, default=8)
    parser.add_argument("--max-queue-size", dest="queue", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    report = asyncio.run(measure(**vars(parser.parse_args())))
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["wrong"]) or not report["all_rows_free"])


if __name__ == "__main__":
    main()
