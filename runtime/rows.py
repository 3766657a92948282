"""A request in the queue or in a slot, what is told of it, and how wide the rows of a step are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from graphspec.errors import GraphspecError

from .answer import Answer, Piece
from .engine import Chunk
from .width_policy import AUTO, Candidate, Choice, History, Width, WidthPolicy

PREFILL_CHUNK = 256

OnNews = Callable[[Piece | GraphspecError], None]
"""Called during a turn: pieces, the last of which carries the answer, or one error that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What one step did."""

    width: int
    accepted: tuple[int, ...]
    """Drafts accepted in each row that still counted."""
    committed: int
    """Tokens that became output."""
    seconds: float = 0.0
    """That the device was at work since the report before, with prompts too; 0 where it is not measured."""
    is_step: bool = True
    """False: it was the end of a prompt, which commits a token too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """How one request went that was answered; times in seconds."""

    num_prompt_tokens: int
    num_cached_tokens: int
    queue_time: float
    """From `add` to a slot."""
    prefill_time: float
    """From there to the first token."""
    decode_time: float
    """From there to the end."""


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A request in the queue or in a slot."""

    answer: Answer
    on_news: OnNews
    width: Width
    chunk_size: int = PREFILL_CHUNK
    client: Hashable = field(default_factory=object)
    """Those of one client share its part of the slots; by default each is a client of its own."""
    deadline: float | None = None
    """In seconds of the loop's clock: then the answer ends with what there is of it."""
    cancelled: bool = False
    """Set from any thread: ends within a turn, and its caller hears nothing more."""
    slot: int = -1
    chunks: deque[Chunk] | None = None
    """Of the prompt, still to be launched; None: not started yet."""
    in_flight: int = 0
    """Launches that will commit at least one token each."""
    num_drafts: int | None = None
    """Asked for in its newest launch; None: K."""
    done: bool = False
    added: float = 0.0
    placed: float = 0.0
    first: float = 0.0
    """When its first token came."""
    history: History = field(default_factory=History)
    """Of its drafts, where its width is chosen."""

    @property
    def length(self) -> int:
        """Positions of its slot that are written, or about to be."""
        unread = sum(len(chunk.tokens) for chunk in tuple(self.chunks or ()))
        return len(self.answer.prompt) - unread + len(self.answer.token_ids)

    @property
    def has_more(self) -> bool:
        """Whether a step may add to the answer: not if what is launched is certain to fill it."""
        if self.done or self.cancelled or self.chunks is None or self.chunks:
            return False
        return self.left > 0

    @property
    def left(self) -> int:
        """Tokens that the answer may take beyond those that are certain to come."""
        return self.answer.limit - len(self.answer.token_ids) - self.in_flight

    @property
    def candidate(self) -> Candidate:
        """What its width is chosen by."""
        return Candidate(self.history, self.left, read=not self.in_flight, num_drafts=self.num_drafts)


def each_width(ready: Sequence[Row], policy: WidthPolicy | None, *, on_demand: bool) -> dict[Row, Choice]:
    """Of the next step of these rows; drafts are for a step after it that is as wide, where the policy knows no better.
    `on_demand`: the engine makes no more drafts than it is asked for."""
    open_rows = [row.candidate for row in ready if row.width == AUTO]
    chosen = policy.choose(open_rows) if policy and open_rows else Choice(0, 0)
    there, found = _drafts_there(ready) if on_demand else {}, dict[Row, Choice]()
    for row in ready:
        if row.width == AUTO:
            found[row] = chosen
        elif isinstance(row.width, int):
            found[row] = Choice(row.width, row.width)
        else:
            width = row.width.at(len(ready))
            found[row] = Choice(min(width, there.get(row.width, width)), width)
    return found


def _drafts_there(ready: Sequence[Row]) -> dict[Width, int]:
    """That every row of a schedule has, where one was asked for fewer than K: as rows end, a step may be wider than
    the one before it knew."""
    found = dict[Width, int]()
    for row in ready:
        if row.num_drafts is not None:
            found[row.width] = min(row.num_drafts, found.get(row.width, row.num_drafts))
    return found
