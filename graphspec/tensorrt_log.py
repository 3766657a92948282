"""What TensorRT and TensorRT-RTX say: they return None where others raise, and the reason goes to a logger.

Used by what compiles (export) and by what loads (runtime), which do not know each other; the library is handed in.
"""

from __future__ import annotations

from typing import Any


def collecting_logger(library: Any) -> Any:
    """A logger of the library's own kind that keeps its errors in `messages`."""

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.messages.append(" ".join(message.split()))

    return Logger()


def reason(logger: Any) -> str:
    """The last error that a collecting logger has heard."""
    return logger.messages[-1] if logger.messages else "no reason was given"
