"""Requests that nothing is wrong with, and that were not answered: they may be sent again."""

from __future__ import annotations

from graphspec.errors import GraphspecError


class RefusedError(GraphspecError):
    """Not now."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        """`retry_after`: seconds after which it is worth asking again."""
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(RefusedError):
    """More requests wait than the queue holds."""


class ShutDownError(RefusedError):
    """The server ends before it could answer."""


class DeadlineError(RefusedError):
    """The request's time was over before its first token."""
