"""A server's life: it listens, loads, says that it is ready, and at SIGTERM finishes what it began."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from graphspec.errors import ConfigError

from .app import Serving, create_app
from .model import Model

_CLOSING_SECONDS = 5
"""For answers that are written, but not yet read by their clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen; port 0 is any free one."""

    host: str
    port: int


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would stop answering at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One server, from `run` to its end. `stop` ends it, from any thread."""

    def __init__(
        self,
        serving: Serving,
        address: Address,
        load: Callable[[], Model],
        *,
        drain: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Listens at once, so that a port in use is an OSError here. `load` runs in a thread, while requests are
        told to come again; `say` gets the line that the server is ready."""
        self._serving, self._load, self._drain, self._say = serving, load, drain, say
        self._socket = _listen(address)
        self._host = address.host
        config = uvicorn.Config(
            create_app(serving),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        self._server = _Server(config)
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: threading.Thread | None = None

    @property
    def loading(self) -> bool:
        """Whether it is still at work on the model, after `run` too: a thread cannot be ended."""
        return self._loading is not None and self._loading.is_alive()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    def run(self) -> None:
        """Until a signal or `stop`. Raises what `load` raised."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """Drains and ends; a second time, without draining."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with _signals(self._loop, self._stop):
            serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            try:
                await self._load_and_wait()
            finally:
                self._server.should_exit = True
                await serving

    async def _load_and_wait(self) -> None:
        model = await self._loaded()
        if model is None:
            return
        try:
            scheduler = model.scheduler
            self._serving.metrics.watch(scheduler)
            self._serving.model = model
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._say(f"Server ready on http://{host}:{self.port} (Press CTRL+C to quit)")
            await self._stopping.wait()
            self._serving.draining = True
            if left := scheduler.num_running + scheduler.num_waiting:
                self._say(f"Draining {left} requests for up to {self._drain:g} s (CTRL+C again ends them)")
            await self._close(model)
        finally:
            model.close()

    async def _loaded(self) -> Model | None:
        """None if it was stopped first: the loading thread is left to end with the process."""
        loading: concurrent.futures.Future[Model] = concurrent.futures.Future()

        def load() -> None:
            try:
                loading.set_result(self._load())
            except BaseException as error:
                loading.set_exception(error)

        self._loading = threading.Thread(target=load, name="graphspec-loading", daemon=True)
        self._loading.start()
        work = asyncio.wrap_future(loading)
        await self._first(work)
        return work.result() if work.done() else None

    async def _first(self, work: asyncio.Future[Any]) -> None:
        """Until `work` is done, or a signal comes."""
        stopped = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _close(self, model: Model) -> None:
        """Lets running requests end; a second signal ends them."""
        self._stopping.clear()
        closing = asyncio.create_task(asyncio.to_thread(model.scheduler.close, drain=self._drain))
        await self._first(closing)
        if not closing.done():
            await asyncio.to_thread(model.scheduler.close)
        await closing

    def _stop(self) -> None:
        self._stopping.set()


def _listen(address: Address) -> socket.socket:
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((address.host, address.port), family=family, backlog=2048)
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        # What Python adds to the system's reason names the address again.
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {reason}; use another {'--host' if is_host else '--port'}"
        ) from error
    listening.setblocking(False)
    return listening


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """Within, the signals that end a process call `stop`; where they cannot be caught (a thread), nothing changes."""
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before = signal.getsignal(number)
            loop.add_signal_handler(number, stop)
            caught.append((number, before))
        except (RuntimeError, ValueError, NotImplementedError):
            break
    try:
        yield
    finally:
        for number, before in caught:
            loop.remove_signal_handler(number)
            signal.signal(number, before)
