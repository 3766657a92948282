"""What decides a draft besides its target and its data. None: the method's, or the target's."""

from __future__ import annotations

from dataclasses import dataclass

from graphspec.errors import ConfigError
from graphspec.speculative_config import LONGEST_DRAFT

from .precision import check_precision

_SEEDS = 2**32
"""Every step draws with a seed of its own, made of this one: together they fit in the 64 bits of torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of a draft that its target does not decide; None: the target's."""

    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    """None: the method's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides a training besides its data."""

    epochs: int = 4
    batch_size: int = 4
    """Conversations in a batch."""
    depth: int = 4
    """Drafts in a row that are trained: unrolls of an EAGLE head, a block's masks, Medusa's heads."""
    decay: float = 0.8
    """Weight of a draft's loss, relative to the one before."""
    learning_rate: float = 3e-4
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    """Norm of the gradient."""
    precision: str = "float32"
    """Of matrix products, those of the features included: precision.PRECISIONS."""
    seed: int = 0
    anchors: int | None = None
    """Positions of a conversation behind which drafts are taught, each epoch others; None: the method's."""

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if min(self.epochs, self.batch_size, self.depth) < 1:
            raise ConfigError("--epochs, --batch-size and --depth must each be at least 1")
        if self.depth > LONGEST_DRAFT:
            raise ConfigError(f"--depth {self.depth}: a step drafts {LONGEST_DRAFT} tokens at most")
        if not 0 <= self.seed < _SEEDS:
            raise ConfigError(f"--seed {self.seed}: give one of 0 to {_SEEDS - 1}")
        if self.anchors is not None and self.anchors < 1:
            raise ConfigError("--anchors must be at least 1")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"--learning-rate {self.learning_rate} must be above 0 and below 1")
