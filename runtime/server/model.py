"""A loaded bundle, what runs its requests, and what is said about its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..acceptance import AcceptanceStatistics
from ..answer_format import AnswerFormat
from ..generate import LoadedBundle
from ..rows import BatchReport
from ..scheduler import Scheduler
from .metrics import Metrics

LOG_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What serves requests."""

    bundle: LoadedBundle
    scheduler: Scheduler
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    """How it marks calls and reasoning in chats."""
    request_timeout: float | None = None
    """Seconds that a client's request may take; it may ask for fewer."""


def start(
    bundle: LoadedBundle,
    metrics: Metrics,
    *,
    max_queue_size: int = 256,
    overlap: bool = True,
    width: int | None = None,
    answers: AnswerFormat | None = None,
    request_timeout: float | None = None,
    prefix_store: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Model:
    """Starts the bundle's scheduler. `answers`: None is what the chat template says. `prefix_store`: in bytes. `say`
    gets a line about its steps now and then, from the scheduler's thread. Raises RequestError for a width that is not
    in the bundle, ConfigError for a store that its engine cannot fill."""
    log = BatchLog(say)

    def stepped(report: BatchReport) -> None:
        metrics.stepped(report)
        log.take(report, scheduler.num_running, scheduler.num_waiting)

    scheduler = Scheduler(
        bundle,
        max_queue_size=max_queue_size,
        overlap=overlap,
        width=width,
        prefix_store=prefix_store,
        on_batch=stepped,
        on_answer=metrics.answered,
    )
    return Model(
        bundle=bundle,
        scheduler=scheduler,
        answers=AnswerFormat.of(bundle.tokenizer.chat_template) if answers is None else answers,
        request_timeout=request_timeout,
    )


class BatchLog:
    """One line for the steps of a few seconds: lines for each would be the server's slowest part."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._since: float | None = None
        self._steps = self._tokens = 0
        self._acceptance = AcceptanceStatistics()

    def take(self, report: BatchReport, num_running: int, num_waiting: int) -> None:
        """Counts a step; says a line if it is time, or if no request is left."""
        now = self._clock()
        if self._since is None:
            self._since = now
        self._steps += 1
        self._tokens += report.committed
        self._acceptance = self._acceptance.merge(statistics(report))
        if now - self._since >= LOG_SECONDS or not num_running:
            self._say(self._line(now - self._since, num_running, num_waiting))
            self._since = now if num_running else None
            self._steps = self._tokens = 0
            self._acceptance = AcceptanceStatistics()

    def _line(self, seconds: float, num_running: int, num_waiting: int) -> str:
        speed = f", {self._tokens / seconds:.1f} toks/s" if seconds else ""
        width = len(self._acceptance.verified_per_position)
        return (
            f"{self._steps} steps, {self._tokens} toks{speed} | Running: {num_running} reqs, "
            f"Pending: {num_waiting} reqs | {self._acceptance.log_line(width)}"
        ).rstrip(" |") + " |"


def statistics(report: BatchReport) -> AcceptanceStatistics:
    """What one step verified and accepted. Tokens of an answer's end are not told row by row."""
    counts = AcceptanceStatistics()
    if report.width:
        for accepted in report.accepted:
            counts.add(accepted, report.width)
        counts.output_tokens = report.committed
    return counts
