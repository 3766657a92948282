"""A loaded bundle, what runs its requests, and what is said about its steps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..acceptance import AcceptanceStatistics
from ..answer_format import AnswerFormat
from ..generate import LoadedBundle
from ..rows import BatchReport
from ..scheduler import Scheduler
from ..width_policy import Width
from .metrics import Metrics

LOG_SECONDS = 3.0
_Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What serves requests."""

    bundle: LoadedBundle
    scheduler: Scheduler
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    """How it marks calls and reasoning in chats."""
    request_timeout: float | None = None
    """Seconds that a client's request may take; it may ask for fewer."""
    log: BatchLog | None = None
    """What it says about steps."""

    def close(self) -> None:
        """Closes the bundle, once the scheduler is closed."""
        if self.log is not None:
            self.log.flush()
        self.bundle.close()


def start(
    bundle: LoadedBundle,
    metrics: Metrics,
    *,
    max_queue_size: int = 256,
    overlap: bool = True,
    width: Width | None = None,
    answers: AnswerFormat | None = None,
    request_timeout: float | None = None,
    prefix_store: int | None = None,
    say: _Say = lambda _: None,
) -> Model:
    """Starts the bundle's scheduler. `answers`: None is what the chat template says. `prefix_store`: in bytes. `say`
    gets a line about its steps now and then, from any thread. Raises RequestError for a width that is not
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
        log=log,
    )


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True  # a server that ends does not wait for it
    timer.start()


class BatchLog:
    """One line for the steps of a few seconds: lines for each, or for each short request, would drown all else."""

    def __init__(
        self,
        say: _Say,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = _call_later,
    ) -> None:
        """`later` calls after so many seconds."""
        self._say, self._clock, self._later = say, clock, later
        self._lock = threading.Lock()
        self._newest = -math.inf
        """When the newest line was said."""
        self._since: float | None = None
        """Since when requests run, or since the newest line if they ran then."""
        self._awaited = False
        """Whether `later` will tell the rest."""
        self._num_running = self._num_waiting = 0
        self._worked = 0.0
        """Seconds of work before `since`; told with the next line, as are the rest."""
        self._steps = self._tokens = 0
        self._acceptance = AcceptanceStatistics()

    def take(self, report: BatchReport, num_running: int, num_waiting: int) -> None:
        """Counts a step; says a line if it is time. When no request is left, it is time a few seconds after the
        newest line, or now."""
        with self._lock:
            now = self._clock()
            if self._since is None:
                self._since = now
            self._num_running, self._num_waiting = num_running, num_waiting
            self._steps += 1
            self._tokens += report.committed
            self._acceptance = self._acceptance.merge(statistics(report))
            if not num_running and not num_waiting:
                self._worked += now - self._since
                self._since = None
                left = self._newest + LOG_SECONDS - now
                if left <= 0:
                    self._tell(now)
                elif not self._awaited:
                    self._awaited = True
                    self._later(left, self.flush)
            elif self._worked + now - self._since >= LOG_SECONDS:
                self._tell(now)

    def flush(self) -> None:
        """Says what is not told yet."""
        with self._lock:
            self._awaited = False
            if self._steps:
                self._tell(self._clock())

    def _tell(self, now: float) -> None:
        if self._since is not None:
            self._worked += now - self._since
            self._since = now
        self._say(self._line())
        self._newest = now
        self._worked = 0.0
        self._steps = self._tokens = 0
        self._acceptance = AcceptanceStatistics()

    def _line(self) -> str:
        speed = f", {self._tokens / self._worked:.1f} toks/s" if self._worked else ""
        width = len(self._acceptance.verified_per_position)
        return (
            f"{self._steps} steps, {self._tokens} toks{speed} | Running: {self._num_running} reqs, "
            f"Pending: {self._num_waiting} reqs | {self._acceptance.log_line(width)}"
        ).rstrip(" |") + " |"


def statistics(report: BatchReport) -> AcceptanceStatistics:
    """What one step verified and accepted. Tokens of an answer's end are not told row by row."""
    counts = AcceptanceStatistics()
    if report.width:
        for accepted in report.accepted:
            counts.add(accepted, report.width)
        counts.output_tokens = report.committed
    return counts
