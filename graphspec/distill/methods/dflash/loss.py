"""What a batch teaches a DFlash draft: blocks at random positions of the answers."""

from __future__ import annotations

import torch
from torch import Tensor

from graphspec.architectures.drafters.dflash import DFlashDrafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.padding import LENGTHS, round_up
from graphspec.distill.recipe import Recipe
from graphspec.distill.teaching import Anchors, teach

from .blocks import run_blocks

DEFAULT_ANCHORS = 64


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
    most = batch.tokens.shape[1] if hits is not None else recipe.anchors or DEFAULT_ANCHORS
    anchors = choose_anchors(batch, most, generator)
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


def choose_anchors(batch: Batch, most: int, generator: torch.Generator) -> Anchors:
    """At most `most` positions of each conversation that have a token to draft, each as likely as the others."""
    possible = batch.anchors & (torch.arange(batch.tokens.shape[1]) + 2 < batch.lengths.unsqueeze(1))
    count = min(most, round_up(int(possible.sum(1).max()), LENGTHS))
    order = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1.0)
    # Of a row that has fewer, the others stand where a block can be run, and teach nothing.
    positions = order.topk(count, dim=1).indices.sort(dim=1).values
    taught = possible.gather(1, positions)
    return Anchors(torch.where(taught, positions, 0), taught)
