"""A server of the real kind in a thread of the test, and HTTP requests to it without a client library."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphspec.runtime.generate import load
from graphspec.runtime.server.app import Serving
from graphspec.runtime.server.metrics import Metrics
from graphspec.runtime.server.model import Model, start
from graphspec.runtime.server.serve import Address, Service

CHAT = "{% for message in messages %}{{ message.content }}:{% endfor %}"
"""A template in the tiny vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        """OpenAI's error object."""
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The JSON of each server-sent event, [DONE] as a string."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, rest = self.text.split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") for event in events)
        return [data if data == "[DONE]" else json.loads(data) for data in (event[6:] for event in events)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that runs."""

    port: int
    serving: Serving
    service: Service

    @property
    def url(self) -> str:
        """What OpenAI's client calls the base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    @contextmanager
    def hanging(self, path: str, body: object) -> Iterator[socket.socket]:
        """A connection on which a request was sent, and nothing is read."""
        content = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            yield connection

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, b"", **headers)

    def post(self, path: str, body: object, **headers: str) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, content, **headers)

    def send(self, method: str, path: str, content: bytes, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            said = {name.lower(): value for name, value in response.getheaders()}
            return Reply(status=response.status, headers=said, text=response.read().decode())
        finally:
            connection.close()


@contextmanager
def serve(
    load_model: Callable[[Metrics], Model], *, api_key: str | None = None, drain: float = 5.0, wait: bool = True
) -> Iterator[Served]:
    """A server under the name `tiny`, until the block ends; without `wait` it may still load."""
    serving = Serving(names=["tiny"], api_key=api_key, metrics=Metrics("tiny"))
    said = threading.Event()
    service = Service(
        serving,
        Address(host="127.0.0.1", port=0),
        lambda: load_model(serving.metrics),
        drain=drain,
        say=lambda _: said.set(),
    )
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        assert not wait or said.wait(60)
        yield Served(port=service.port, serving=serving, service=service)
    finally:
        service.stop()
        thread.join(30)
        assert not thread.is_alive()


def model(bundle: Path, metrics: Metrics, **options: Any) -> Model:
    """A bundle with a chat template, on one thread; options are those of `start`."""
    loaded = load(bundle, num_threads=1)
    loaded.tokenizer.chat_template = CHAT
    return start(loaded, metrics, **options)
