"""Several processes that make conversations side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from graphspec.errors import EngineError

from .conversations import Conversation, ConversationReader
from .synthesis import Synthesis, synthesise

_POLL_SECONDS = 2.0


def synthesise_in_workers(
    bundle: Path,
    folder: Path,
    plan: Synthesis,
    *,
    rows: int,
    workers: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """`synthesise` in `workers` processes, or in this one; `on_progress` is told conversations and answer tokens."""
    count = _Count(on_progress)
    files = ConversationReader(folder)
    count.add(files.read())
    if workers == 1:
        synthesise(bundle, folder, plan, rows=rows, on_conversation=lambda conversation: count.add([conversation]))
        return
    # A fresh interpreter each: ONNX Runtime's threads do not survive a fork.
    with _dying_said(), ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {
            pool.submit(synthesise, bundle, folder, plan, rows=rows, worker=worker, workers=workers)
            for worker in range(workers)
        }
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS)
            count.add(files.read())
            for future in done:
                future.result()


@contextmanager
def _dying_said() -> Iterator[None]:
    """A process that the system ends has no error of its own."""
    try:
        yield
    except BrokenExecutor as error:
        raise EngineError(
            "a process that makes conversations was ended from outside, most likely for want of memory: fewer "
            "--workers or --rows need less; the same command goes on"
        ) from error


class _Count:
    """Conversations and answer tokens so far."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._conversations = self._tokens = 0
        self._on_progress = on_progress

    def add(self, conversations: Sequence[Conversation]) -> None:
        self._conversations += len(conversations)
        self._tokens += sum(len(conversation.answer) for conversation in conversations)
        self._on_progress(self._conversations, self._tokens)
