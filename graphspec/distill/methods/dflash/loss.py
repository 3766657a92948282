"""What a batch teaches a DFlash draft: blocks at random positions of the answers."""

from __future__ import annotations

import torch
from torch import Tensor

from graphspec.architectures.drafters.dflash import DFlashDrafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.anchors import taught_anchors
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.recipe import Recipe
from graphspec.distill.teaching import teach

from .blocks import run_blocks


def loss(
    drafter: DFlashDrafter,
    target: DecoderTarget,
    batch: Batch,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    hits: Hits | None = None,
) -> Tensor:
    """Mean cross entropy of the drafts of `recipe.anchors` blocks of each conversation; where hits are counted, of
    all its blocks."""
    assert drafter.head is not None
    head = drafter.head.weight
    anchors = taught_anchors(batch, recipe, generator, hits)
    out = run_blocks(drafter, target, batch.tokens, batch.taps, anchors.positions + 1)
    return teach(
        target,
        batch,
        drafter.says,
        anchors,
        ((drafter.norm(draft), head) for draft in out[:, :, 1:].unbind(2)),
        decay=recipe.decay,
        hits=hits,
    )
