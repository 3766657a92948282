"""Several processes that make conversations side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path

from .conversations import Conversation, read_conversations
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
    if workers == 1:
        count = _Count(read_conversations(folder), on_progress)
        synthesise(bundle, folder, plan, rows=rows, on_conversation=count.add)
        return
    # A fresh interpreter each: ONNX Runtime's threads do not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {
            pool.submit(synthesise, bundle, folder, plan, rows=rows, worker=worker, workers=workers)
            for worker in range(workers)
        }
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS)
            _Count(read_conversations(folder), on_progress)
            for future in done:
                future.result()


class _Count:
    """Conversations and answer tokens so far."""

    def __init__(self, done: list[Conversation], on_progress: Callable[[int, int], None]) -> None:
        self._conversations, self._tokens = len(done), sum(len(conversation.answer) for conversation in done)
        self._on_progress = on_progress
        on_progress(self._conversations, self._tokens)

    def add(self, conversation: Conversation) -> None:
        self._conversations += 1
        self._tokens += len(conversation.answer)
        self._on_progress(self._conversations, self._tokens)
