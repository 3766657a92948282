"""A loop in a thread of its own, for callers in other threads: the server's requests.

submit ─▶ queue ─▶ the thread's turns ─▶ pieces to the caller
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from graphspec.errors import ConfigError
from graphspec.manifest import Manifest

from .answer import new_answer
from .generate import LoadedBundle
from .loop import Loop, Policy
from .refusals import QueueFullError, ShutDownError
from .requests import check_count
from .rows import PREFILL_CHUNK, BatchReport, OnNews, RequestReport, Row
from .sampling import SamplingParams
from .width_policy import AdaptiveWidths, Width

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one caller asks for."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculative: bool = True
    """False: one token a step. The text is the same."""
    client: Hashable = None
    """Requests of one client share its part of the rows; None: this one is a client of its own."""
    deadline: float | None = None
    """In seconds of the scheduler's clock, time.monotonic. Then the answer ends with the tokens there are, of
    length, or if there are none with a DeadlineError."""


class Ticket:
    """A submitted request."""

    def __init__(self, scheduler: Scheduler, row: Row) -> None:
        self._scheduler, self._row = scheduler, row

    def cancel(self) -> None:
        """Ends the request within a step; its caller hears nothing more. From any thread, any number of times."""
        self._scheduler._cancel(self._row)


PREFIX_STORE = 256 * 1024 * 1024
"""Bytes."""


class Scheduler:
    """One thread that drives one engine."""

    def __init__(
        self,
        bundle: LoadedBundle,
        *,
        max_queue_size: int = 256,
        overlap: bool = True,
        width: Width | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_store: int | None = None,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_answer: Callable[[RequestReport], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`width`: drafts verified a step, or "auto"; None: the widest of the bundle. The engine is the
        scheduler's alone. `prefix_store`: bytes of memory for what slots held before others took them; None:
        PREFIX_STORE where the engine can keep it. `on_batch` and `on_answer` are called from its thread. Raises
        ConfigError for a store that the engine cannot fill."""
        check_count("max_queue_size", max_queue_size)
        check_count("prefill_chunk", prefill_chunk)
        self._bundle = bundle
        self._max_queue_size, self._prefill_chunk = max_queue_size, prefill_chunk
        self._width = bundle.checked_width(width)
        self._loop = Loop(
            bundle.engine,
            Policy(
                overlap=overlap,
                most_stored=store_bytes(bundle, prefix_store) // max(bytes_per_token(bundle.manifest), 1),
            ),
            widths=AdaptiveWidths(bundle.manifest.widths, on_demand=bundle.engine.drafts_on_demand),
            on_batch=on_batch,
            on_answer=on_answer,
            on_failure=_log_failure,
            clock=clock,
        )
        self._closing = self._giving_up = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="graphspec-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._loop.num_waiting

    @property
    def cache_usage(self) -> float:
        """Share of the cache's positions that running requests use."""
        return self._loop.cache_usage

    def submit(self, request: GenerationRequest, on_piece: OnNews) -> Ticket:
        """Puts the request into the queue; `on_piece` is called from the scheduler's thread. Raises RequestError,
        QueueFullError, and ShutDownError for a new client after `close`."""
        answer = new_answer(self._bundle.manifest, self._bundle.tokenizer, request.prompt, request.params)
        width = self._width if request.speculative else 0
        row = Row(
            answer=answer,
            on_news=on_piece,
            width=width,
            chunk_size=self._prefill_chunk,
            client=object() if request.client is None else request.client,
            deadline=request.deadline,
        )
        with self._changed:
            self._check_room(row.client)
            self._loop.add(row)
            self._changed.notify_all()
        return Ticket(self, row)

    def close(self, *, drain: float = 0.0) -> None:
        """Refuses new requests, goes on with the others for up to `drain` seconds, then fails them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._loop.idle, timeout=drain)
            self._giving_up = True
            self._changed.notify_all()
        self._thread.join()

    def _check_room(self, client: Hashable) -> None:
        # What was begun is finished: the rest of a batch too, whose client waits for all of it.
        if self._giving_up or (self._closing and not self._loop.serves(client)):
            raise ShutDownError("the server is shutting down; ask another one")
        waiting = self._loop.num_waiting
        if waiting >= self._max_queue_size:
            raise QueueFullError(
                f"{waiting} requests are waiting, as many as --max-queue-size allows; try again later",
                retry_after=self._loop.retry_after,
            )

    def _cancel(self, row: Row) -> None:
        with self._changed:
            self._loop.drop(row)
            self._changed.notify_all()

    def _run(self) -> None:
        loop = self._loop
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not loop.idle)
                if self._closing and loop.idle:
                    return
                if self._giving_up:
                    loop.fail_all(ShutDownError("the server shut down before the answer was complete; ask again"))
                loop.admit()
            try:
                loop.turn()
            except Exception as error:  # every request was told
                _log_failure(error)
            with self._changed:
                self._changed.notify_all()


def _log_failure(error: Exception) -> None:
    log.error("a step, or a caller, failed: %s", error, exc_info=error)


def store_bytes(bundle: LoadedBundle, asked: int | None) -> int:
    """Of the prefix store; None: PREFIX_STORE where the engine can keep it. Raises ConfigError if it cannot."""
    if bundle.engine.num_places > bundle.engine.num_slots:
        return PREFIX_STORE if asked is None else asked
    if asked:
        raise ConfigError(
            f"a prefix store of {asked} bytes: {bundle.manifest.backend.name} on "
            f"{bundle.manifest.backend.device_class} keeps prompts only in the rows; leave it out"
        )
    return 0


def bytes_per_token(manifest: Manifest) -> int:
    """Of all caches of one row."""
    return sum(state.row_bytes(1) for state in manifest.states if "capacity" in state.shape)
