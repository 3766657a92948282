"""What a batch teaches an EAGLE-3 head: every unrolled draft against the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.recipe import Recipe
from graphspec.distill.teaching import Anchors, teach

from .unroll import unroll


def loss(
    drafter: Eagle3Drafter,
    target: DecoderTarget,
    batch: Batch,
    recipe: Recipe,
    generator: torch.Generator,  # noqa: ARG001 - every position is taught
    *,
    hits: Hits | None = None,
) -> Tensor:
    """`batch_loss` as training asks for it."""
    return batch_loss(drafter, target, batch, depth=recipe.depth, decay=recipe.decay, hits=hits)


def batch_loss(
    drafter: Eagle3Drafter, target: DecoderTarget, batch: Batch, *, depth: int, decay: float, hits: Hits | None = None
) -> Tensor:
    """Mean cross entropy of the unrolls at every position of the answers (teaching.teach)."""
    assert drafter.head is not None
    first, last = int(batch.anchors.any(0).nonzero()[0]), batch.tokens.shape[1]
    positions = torch.arange(first, last).expand(len(batch.tokens), -1)
    head = drafter.head
    return teach(
        target,
        batch,
        torch.arange(len(drafter.offsets)) + drafter.offsets,
        Anchors(positions, batch.anchors[:, first:]),
        unroll(drafter, target, batch.tokens, batch.taps, depth=depth, first=first),
        lambda out: head(drafter.norm(out)),
        decay=decay,
        hits=hits,
    )
