"""A command line run in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one command line did."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines of stderr that are not about progress."""
        return [line for line in self.err.splitlines() if not line.startswith("[")]


Command = Callable[..., Run]
"""Takes the words of the command line."""
