"""What is shown while conversations are made: those that were there, and each that is added, counted once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from graphspec.distill import workers as module
from graphspec.distill.conversations import Conversation, ConversationFile
from graphspec.distill.synthesis import Synthesis
from graphspec.distill.workers import synthesise_in_workers
from graphspec.errors import EngineError


def append(folder: Path, worker: int, index: int) -> Conversation:
    """One whose answer has as many tokens as its index."""
    made = Conversation(index=index, seed=0, temperature=0.0, category="", prompt=(index,), answer=(1,) * index)
    file = ConversationFile(folder / f"conversations-{worker}-of-2.jsonl")
    file.append(made)
    file.close()
    return made


def made_up(
    _bundle: Path,
    folder: Path,
    plan: Synthesis,
    *,
    rows: int,  # noqa: ARG001
    worker: int = 0,
    workers: int = 1,
    on_conversation: Callable[[Conversation], None] = lambda _: None,
) -> None:
    for index in range(10 + worker, 10 + plan.count, workers):
        on_conversation(append(folder, worker, index))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_count_goes_on_from_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    def threads(count: int, **_: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(module, "synthesise", made_up)
    monkeypatch.setattr(module, "ProcessPoolExecutor", threads)
    append(tmp_path, 0, 5)
    seen: list[tuple[int, int]] = []
    plan = Synthesis(count=4)
    synthesise_in_workers(
        tmp_path, tmp_path, plan, rows=1, workers=workers, on_progress=lambda *shown: seen.append(shown)
    )
    assert seen[0] == (1, 5)
    assert seen[-1] == (5, 5 + 10 + 11 + 12 + 13)
    assert seen == sorted(seen)


def test_a_process_that_is_ended_from_outside_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ProcessPoolExecutor", _Ending)
    with pytest.raises(EngineError, match="fewer --workers or --rows need less"):
        synthesise_in_workers(tmp_path, tmp_path, Synthesis(count=4), rows=1, workers=2)


class _Ending(ThreadPoolExecutor):
    """Whose work ends as that of a pool of processes does when one is killed."""

    def __init__(self, workers: int, **_: Any) -> None:
        super().__init__(workers)

    def submit(self, *_: Any, **__: Any) -> Any:
        return super().submit(_broken)


def _broken() -> None:
    raise BrokenProcessPool
