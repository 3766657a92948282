"""One contender as a process: it waits, blocked, until a line comes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import reason_in

_TICKS = os.sysconf("SC_CLK_TCK")
_SECONDS_TO_END = 5.0
"""For a contender whose stdin was closed."""


class ContenderError(Exception):
    """A contender that died or did not answer in time."""


class Worker:
    """Started when made. Use as a context manager, or call `close`."""

    def __init__(
        self, command: Sequence[str], log: Path, *, threads: int, timeout: float, own_path: bool = True
    ) -> None:
        """stderr goes to the log; no request may take longer than the timeout (seconds). `own_path` False: this
        process's PYTHONPATH is not for it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._timeout = log, timeout
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if not own_path:
            environ.pop("PYTHONPATH", None)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
            )
        self._lines = queue.SimpleQueue[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def about(self) -> Mapping[str, str]:
        """What it says of itself when it is loaded. Raises ContenderError."""
        about: Mapping[str, str] = self._answer()["about"]
        return about

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises ContenderError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(self._why()) from None
        return self._answer()

    def cpu_seconds(self) -> float:
        """Of the process so far, all threads; Linux only."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def close(self) -> None:
        """Ends it, politely first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_SECONDS_TO_END)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise ContenderError(f"no answer in {self._timeout:g} s") from None
        if not line:
            raise ContenderError(self._why())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _why(self) -> str:
        status = self._process.wait()
        ended = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        return f"it ended with {ended}: {reason_in(self._log)}"
