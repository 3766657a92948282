"""From loading to the last answer: clients that leave, queues that are full, and the end of a server."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_scheduler import FakeScheduler
from openai import OpenAI, RateLimitError
from pairs import NAMES, Pairs
from served import Served, model, serve

from graphspec.errors import ConfigError, GraphspecError
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.runtime.refusals import DeadlineError, ShutDownError
from graphspec.runtime.server.app import Serving
from graphspec.runtime.server.metrics import Metrics
from graphspec.runtime.server.model import Model
from graphspec.runtime.server.serve import Address, Service

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def bundle(pairs: Pairs) -> LoadedBundle:
    return load(pairs.bundle(NAMES[1]), num_threads=1)


@pytest.fixture
def scheduler() -> Any:
    return FakeScheduler()


@pytest.fixture
def served(bundle: LoadedBundle, scheduler: Any) -> Iterator[Served]:
    scheduler.may_close.set()
    with serve(lambda _: Model(bundle=bundle, scheduler=scheduler)) as running:
        yield running


def read_until(connection: socket.socket, expected: bytes) -> bytes:
    said = b""
    while expected not in said:
        more = connection.recv(10_000)
        assert more
        said += more
    return said


@pytest.mark.parametrize("leave", ["close", "half"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_stops_its_answers(
    served: Served, scheduler: FakeScheduler, leave: str, stream: bool, begun: bool
) -> None:
    body = {"prompt": ["abc", "xyz"], "max_tokens": 50, "stream": stream}
    with served.hanging(TEXT, body) as connection:
        tickets = scheduler.wait_for(2)
        if begun:
            tickets[0].give_text("ab")
            if stream:
                read_until(connection, b"data: ")
        assert not any(ticket.cancelled.is_set() for ticket in tickets)
        if leave == "half":
            connection.shutdown(socket.SHUT_WR)
            assert all(ticket.cancelled.wait(5) for ticket in tickets)
    assert all(ticket.cancelled.wait(5) for ticket in tickets)
    assert served.get("/health").status == 200


def test_an_answer_that_ended_is_not_cancelled(served: Served, scheduler: FakeScheduler) -> None:
    with served.hanging(TEXT, {"prompt": "abc"}) as connection:
        (ticket,) = scheduler.wait_for(1)
        ticket.give_text("abcd", last=True)
        read_until(connection, b"abcd")
    time.sleep(0.05)
    assert not ticket.cancelled.is_set()


def test_a_full_queue_is_a_429_that_says_when_to_come_again(served: Served, scheduler: FakeScheduler) -> None:
    scheduler.room = 0
    for stream in (False, True):
        reply = served.post(TEXT, {"prompt": "abc", "stream": stream})
        assert (reply.status, reply.headers["retry-after"]) == (429, "2")
        assert reply.error["type"] == "rate_limit_error"
    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as client, pytest.raises(RateLimitError):
        client.completions.create(model="tiny", prompt="abc")


def test_a_mistake_of_ours_is_a_500_and_the_server_stays(
    served: Served, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a secret of the inside")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "submit", broken)
        reply = served.post(TEXT, {"prompt": "abc"})
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "secret" not in reply.text
    with served.hanging(TEXT, {"prompt": "abc"}) as connection:
        scheduler.wait_for(1)[0].give_text("abcd", last=True)
        read_until(connection, b"abcd")


def test_a_request_s_time_is_the_least_of_its_own_and_the_server_s(bundle: LoadedBundle, scheduler: Any) -> None:
    scheduler.may_close.set()
    asked: list[tuple[dict[str, Any], float]] = [
        ({}, 100.0),
        ({"timeout": 7}, 7.0),
        ({"timeout": 7.5, "stream": True}, 7.5),
        ({"timeout": 1e9}, 100.0),
    ]
    with serve(lambda _: Model(bundle=bundle, scheduler=scheduler, request_timeout=100.0)) as running:
        for number, (fields, limit) in enumerate(asked):
            with running.hanging(TEXT, {"prompt": ["abc", "xyz"], **fields}):
                now = time.monotonic()
                found = [ticket.request for ticket in scheduler.wait_for(2 * number + 2)[2 * number :]]
            assert found[0].deadline == found[1].deadline == pytest.approx(now + limit, abs=5.0)
            assert found[0].client == found[1].client  # one HTTP request is one client of the queue
        assert len({ticket.request.client for ticket in scheduler.tickets}) == len(asked)


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_time_that_is_none_is_refused(served: Served, timeout: object) -> None:
    reply = served.post(TEXT, {"prompt": "abc", "timeout": timeout})
    assert (reply.status, reply.error["param"]) == (400, "timeout")


@pytest.mark.parametrize(
    ("error", "code"), [(ShutDownError("the server ends"), None), (DeadlineError("too late"), "timeout")]
)
def test_what_the_server_could_not_do_now_is_a_503_that_says_when_to_come_again(
    served: Served, scheduler: FakeScheduler, error: GraphspecError, code: str | None
) -> None:
    with served.hanging(TEXT, {"prompt": "abc"}) as connection:
        scheduler.wait_for(1)[-1].give(error)
        said = read_until(connection, b"}}").decode()
    assert said.startswith("HTTP/1.1 503")
    assert "retry-after: 1" in said.lower()
    assert json.loads(said.split("\r\n\r\n")[1])["error"] == {
        "message": str(error),
        "type": "unavailable_error",
        "param": None,
        "code": code,
    }
    with served.hanging(TEXT, {"prompt": "abc", "stream": True}) as connection:
        scheduler.wait_for(2)[-1].give(error)
        assert str(error) in read_until(connection, b"}}").decode()


def test_openais_client_comes_again(served: Served, scheduler: FakeScheduler) -> None:
    scheduler.room = 0

    def make_room() -> None:
        time.sleep(0.2)
        scheduler.room = 1
        scheduler.wait_for(1)[0].give_text("abcd", last=True)

    later = threading.Thread(target=make_room)
    later.start()
    with OpenAI(base_url=served.url, api_key="none", max_retries=2) as client:
        assert client.completions.create(model="tiny", prompt="abc").choices[0].text == "abcd"
    later.join()


def test_a_batch_larger_than_the_queue_waits_for_room(served: Served, scheduler: FakeScheduler) -> None:
    scheduler.room = 1
    with served.hanging(TEXT, {"prompt": ["a", "b", "c"], "stream": True}) as connection:
        for count in (1, 2, 3):
            ticket = scheduler.wait_for(count)[-1]
            scheduler.room = count + 1 if count != 2 else count  # the last one has to try again
            ticket.give_text("xy", last=True)
            if count == 2:
                time.sleep(0.2)
                scheduler.room = 3
        said = read_until(connection, b"[DONE]")
    texts = [line[6:] for line in said.decode().splitlines() if line.startswith('data: {"')]
    ended = [choice["index"] for text in texts for choice in json.loads(text)["choices"] if choice["finish_reason"]]
    assert ended == [0, 1, 2]


def test_large_batches_leave_the_queue_open_to_others(served: Served, scheduler: FakeScheduler) -> None:
    with served.hanging(TEXT, {"prompt": ["a"] * 100}):
        scheduler.wait_for(32)
        time.sleep(0.1)
        assert len(scheduler.tickets) == 32
        scheduler.tickets[5].give_text("xy", last=True)
        scheduler.wait_for(33)


def test_until_it_has_loaded_it_is_alive_and_not_ready(bundle: LoadedBundle, scheduler: Any) -> None:
    scheduler.may_close.set()
    may_load = threading.Event()

    def slow(_: Metrics) -> Model:
        assert may_load.wait(10)
        return Model(bundle=bundle, scheduler=scheduler)

    with serve(slow, wait=False) as running:
        try:
            assert running.get("/health").status == 200
            for reply in (running.get("/health/ready"), running.post(TEXT, {"prompt": "abc"})):
                assert (reply.status, reply.error["type"]) == (503, "unavailable_error")
                assert "retry-after" in reply.headers
        finally:
            may_load.set()
        end = time.monotonic() + 10
        while running.get("/health/ready").status != 200:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_signal_while_it_loads_ends_it_at_once() -> None:
    may_load = threading.Event()
    serving = Serving(names=["tiny"], metrics=Metrics("tiny"))

    def slow() -> Model:
        service.stop()
        may_load.wait(10)
        raise ConfigError("nobody hears it")

    service = Service(serving, Address(host="127.0.0.1", port=0), slow, drain=20)
    started = time.monotonic()
    service.run()
    may_load.set()
    assert time.monotonic() - started < 5


def test_at_its_end_it_refuses_what_is_new_and_finishes_what_runs(bundle: LoadedBundle, scheduler: Any) -> None:
    with (
        serve(lambda _: Model(bundle=bundle, scheduler=scheduler), drain=20) as running,
        running.hanging(TEXT, {"prompt": "abc"}) as connection,
    ):
        (ticket,) = scheduler.wait_for(1)
        running.service.stop()
        end = time.monotonic() + 10
        while running.get("/health/ready").status != 503:
            assert time.monotonic() < end
        assert running.get("/health").status == 200
        assert running.post(TEXT, {"prompt": "abc"}).status == 503
        ticket.give_text("abcd", last=True)
        read_until(connection, b"abcd")
        assert scheduler.drained == [20]
        scheduler.may_close.set()


def test_a_second_signal_does_not_wait(bundle: LoadedBundle, scheduler: Any) -> None:
    started = time.monotonic()
    with serve(lambda _: Model(bundle=bundle, scheduler=scheduler), drain=20) as running:
        running.service.stop()
        while not scheduler.drained:
            time.sleep(0.01)
        closing = threading.Timer(0.2, scheduler.may_close.set)
        closing.start()
        running.service.stop()
        while len(scheduler.drained) < 2:
            time.sleep(0.01)
    assert scheduler.drained == [20, 0]
    assert time.monotonic() - started < 10


def test_what_fails_while_loading_ends_the_server_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Model:
        raise ConfigError("no such device")

    serving = Serving(names=["tiny"], metrics=Metrics("tiny"))
    service = Service(serving, Address(host="127.0.0.1", port=0), fail, drain=0)
    with pytest.raises(ConfigError, match="no such device"):
        service.run()
    gc.collect()  # asyncio tells of errors that nobody asked for when it forgets them
    assert not caplog.records


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_ipv6_address_is_told_as_clients_write_it(pairs: Pairs) -> None:
    bundle, lines = pairs.bundle(NAMES[1]), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        service.stop()

    serving = Serving(names=["tiny"], metrics=Metrics("tiny"))
    service = Service(serving, Address(host="::1", port=0), lambda: model(bundle, serving.metrics), drain=0, say=say)
    port = service.port
    service.run()
    assert lines == [f"Server ready on http://[::1]:{port} (Press CTRL+C to quit)"]
    assert not service.loading


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(host="127.0.0.1", port=taken.getsockname()[1])
        serving = Serving(names=["tiny"], metrics=Metrics("tiny"))
        with pytest.raises(
            ConfigError,
            match=f"^cannot listen on 127.0.0.1:{address.port}: Address already in use; use another --port$",
        ):
            Service(serving, address, lambda: pytest.fail("loaded"), drain=0)
