"""What a backend offers the scheduler: rows with state on a device, and steps over them.

    row state on the device: pending token + K drafts, cache length, sampling, uniform table, caches
    launch(rows, width) ─▶ Pending ─ result() ─▶ accepted, committed

A step starts from what the step before left on the device, so the next one can be launched before this one's
result is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .logprobs import Logits
from .sampling import SamplingParams

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt tokens for one row."""

    slot: int
    tokens: tuple[int, ...]
    next_token: int = NO_TOKEN
    """The prompt token after them, or NO_TOKEN: they end the prompt, commit the target's token."""
    num_logits: int = 0
    """The result has the logits after this many of them, the last ones."""
    num_drafts: int | None = None
    """As of a step, where they end the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one launch did, in the order of its slots."""

    slots: tuple[int, ...]
    accepted: NDArray[np.int64]
    """i64[n]: drafts accepted."""
    committed: NDArray[np.int64]
    """i64[n, W+1]: accepted drafts, the target's own token, then -1."""
    drafts: NDArray[np.int64]
    """i64[n, d]: proposed for after them; -1: none. As many as were asked for, or K."""
    logits: Logits | None = None
    """f32[n, W+1, V]: what each committed token was drawn from; of a chunk, f32[1, num_logits, V]. None: not asked
    for."""

    seconds: float | None = None
    """That the device was at work; None where it is not measured."""

    def drafts_of(self, index: int) -> list[int]:
        """What was proposed for row `index`."""
        return [int(token) for token in self.drafts[index]]

    def tokens(self, index: int) -> list[int]:
        """What row `index` committed."""
        return [int(token) for token in self.committed[index, : self.accepted[index] + 1]]

    def logits_of(self, index: int) -> Logits | None:
        """Those of row `index`, f32[R, V]."""
        return None if self.logits is None else self.logits[index]


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Waits for it. Raises what the step raised."""
        ...


class Engine(Protocol):
    """One loaded bundle on one device. Calls are carried out in order."""

    @property
    def num_slots(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Positions in a row."""
        ...

    @property
    def drafts_on_demand(self) -> bool:
        """Whether a step that is asked for fewer drafts is the shorter for it."""
        ...

    @property
    def num_places(self) -> int:
        """Numbers that `copy` takes: 0, it copies nothing; else the slots, and after them places that hold a row's
        caches until they are needed."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a row's caches become all that the target has; in order with launches. Of
        one that fails, the target has nothing: what counts on it raises."""
        ...

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        """Gives the slot to a new request: its sampling, its table f32[capacity, 1], and caches that hold the first
        `kept` tokens of the slot's last request and nothing else."""
        ...

    def prefill(self, chunk: Chunk) -> Pending:
        """Runs prompt tokens of one row."""
        ...

    def step(self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False) -> Pending:
        """Verifies `width` drafts in each of the rows and drafts anew, `num_drafts` tokens or more (None: K).
        `logits`: the result has them, which only bundles with the capability "logprobs" give."""
        ...

    def drafts(self, slot: int) -> NDArray[np.int64]:
        """The row's pending token and K drafts, i64[K+1]: for tests and tools; waits for what was launched."""
        ...

    def close(self) -> None:
        """Releases the device."""
        ...
