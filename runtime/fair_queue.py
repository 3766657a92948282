"""Whose turn it is when a slot becomes free."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """Something that waits, and on whose behalf."""

    @property
    def client(self) -> Hashable: ...

    @property
    def added(self) -> float:
        """When it began to wait."""
        ...


T = TypeVar("T", bound=Waiting)


class FairQueue(Generic[T]):
    """One line for each client: a client with a thousand requests delays the others by no more than one with two."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, client: Hashable) -> bool:
        """Whether the client waits for anything."""
        return client in self._lines

    def add(self, item: T) -> None:
        """At the end of its client's line."""
        self._lines.setdefault(item.client, deque()).append(item)
        self._count += 1

    def pop(self, served: Iterable[T]) -> T:
        """The first in line of the client that is served least now; of several such, the one that waits longest."""
        counts = Counter(item.client for item in served)
        client = min(self._lines, key=lambda client: (counts[client], self._lines[client][0].added))
        item = self._lines[client][0]
        self.remove(item)
        return item

    def remove(self, item: T) -> None:
        """Takes it out, wherever it stands; nothing, if it does not wait."""
        line = self._lines.get(item.client, ())
        if item in line:
            self._lines[item.client].remove(item)
            self._count -= 1
            if not self._lines[item.client]:
                del self._lines[item.client]

    def clear(self) -> list[T]:
        """Takes out everything."""
        left = [item for line in self._lines.values() for item in line]
        self._lines.clear()
        self._count = 0
        return left
