"""Counts what verification accepted, and says it under names that leave no doubt which rate is meant."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypedDict


class AcceptanceReport(TypedDict):
    """The JSON form of AcceptanceStatistics; lengths are in tokens, rates from 0 to 1."""

    verifications: int
    drafted_tokens: int
    accepted_tokens: int
    output_tokens: int
    acceptance_rate: float
    acceptance_length_without_bonus: float
    acceptance_length_with_bonus: float
    accepted_per_position: list[int]
    joint_acceptance_per_position: list[float]
    conditional_acceptance_per_position: list[float]


@dataclass(slots=True)
class AcceptanceStatistics:
    """Counters over verification passes: one row verifying its drafts in one step. The first draft has
    position 0."""

    verifications: int = 0
    accepted: int = 0
    output_tokens: int = 0
    """Tokens committed by these passes, bonus tokens included."""
    verified_per_position: list[int] = field(default_factory=list)
    """Passes that verified a draft at the position."""
    reached_per_position: list[int] = field(default_factory=list)
    """Those of them that accepted every draft before it."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Those of them that accepted it as well."""

    def add(self, accepted: int, width: int, *, committed: int | None = None) -> None:
        """Counts a pass that verified `width` >= 1 drafts and accepted the first `accepted` of them.

        A row that stopped inside its block names what it kept: `accepted` are the drafts among the kept
        tokens and `committed` is the number kept, instead of accepted + 1. Drafts behind the stop count as
        drafted and not accepted.
        """
        if not 0 <= accepted <= width or width < 1:
            raise ValueError(f"a pass cannot accept {accepted} of {width} drafts")
        for counts in (self.verified_per_position, self.reached_per_position, self.accepted_per_position):
            counts.extend([0] * (width - len(counts)))
        for position in range(width):
            self.verified_per_position[position] += 1
            self.reached_per_position[position] += position <= accepted
            self.accepted_per_position[position] += position < accepted
        self.verifications += 1
        self.accepted += accepted
        self.output_tokens += accepted + 1 if committed is None else committed

    def merge(self, other: "AcceptanceStatistics") -> "AcceptanceStatistics":
        """The counts of both."""
        return AcceptanceStatistics(
            verifications=self.verifications + other.verifications,
            accepted=self.accepted + other.accepted,
            output_tokens=self.output_tokens + other.output_tokens,
            verified_per_position=_sums(self.verified_per_position, other.verified_per_position),
            reached_per_position=_sums(self.reached_per_position, other.reached_per_position),
            accepted_per_position=_sums(self.accepted_per_position, other.accepted_per_position),
        )

    @property
    def drafted(self) -> int:
        """Drafts verified. Drafts proposed beyond the width in use are not counted."""
        return sum(self.verified_per_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 if nothing was drafted, as for every rate here."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts per pass, without the bonus token."""
        return _ratio(self.accepted, self.verifications)

    @property
    def mean_tokens_per_step(self) -> float:
        """Committed tokens per pass, the bonus token included."""
        return _ratio(self.output_tokens, self.verifications)

    @property
    def joint_acceptance_per_position(self) -> tuple[float, ...]:
        """P(the draft at the position is accepted), over the passes that verified one there."""
        return tuple(map(_ratio, self.accepted_per_position, self.verified_per_position))

    @property
    def conditional_acceptance_per_position(self) -> tuple[float, ...]:
        """P(the draft at the position is accepted, given that every draft before it is)."""
        return tuple(map(_ratio, self.accepted_per_position, self.reached_per_position))

    def log_line(self, width: int) -> str:
        """The clause MAX logs; `width` is the number of drafts a step verifies. Empty if nothing was drafted.

        Per-Pos is conditional, as MAX documents it; MAX itself prints the joint rate there.
        """
        if not self.drafted:
            return ""
        rates = enumerate(self.conditional_acceptance_per_position)
        per_position = ", ".join(f"p{position}={rate:.0%}" for position, rate in rates)
        return (
            f"Draft Tokens: {self.accepted}/{self.drafted} ({self.acceptance_rate:.2%}) accepted, "
            f"Acceptance Len: {self.acceptance_length:.2f} / {width} toks "
            f"(accepted drafts/step; {self.mean_tokens_per_step:.2f} toks/step incl bonus), "
            f"Per-Pos: [{per_position}] |"
        )

    def to_json(self) -> AcceptanceReport:
        """Counts and rates under unambiguous names."""
        return AcceptanceReport(
            verifications=self.verifications,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            output_tokens=self.output_tokens,
            acceptance_rate=self.acceptance_rate,
            acceptance_length_without_bonus=self.acceptance_length,
            acceptance_length_with_bonus=self.mean_tokens_per_step,
            accepted_per_position=list(self.accepted_per_position),
            joint_acceptance_per_position=list(self.joint_acceptance_per_position),
            conditional_acceptance_per_position=list(self.conditional_acceptance_per_position),
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
