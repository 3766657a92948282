"""Some positions of the answers, others each time: for methods that would need too much for all of them."""

from __future__ import annotations

import torch

from .batch import Batch, Hits
from .padding import LENGTHS, round_up
from .recipe import Recipe
from .teaching import Anchors

DEFAULT_ANCHORS = 64
"""Of a conversation, in an epoch."""


def taught_anchors(batch: Batch, recipe: Recipe, generator: torch.Generator, hits: Hits | None) -> Anchors:
    """`recipe.anchors` positions of each conversation; all of them where hits are counted."""
    most = batch.tokens.shape[1] if hits is not None else recipe.anchors or DEFAULT_ANCHORS
    return choose_anchors(batch, most, generator)


def choose_anchors(batch: Batch, most: int, generator: torch.Generator) -> Anchors:
    """At most `most` positions of each conversation that have a token to draft, each as likely as the others."""
    possible = batch.anchors & (torch.arange(batch.tokens.shape[1]) + 2 < batch.lengths.unsqueeze(1))
    count = min(most, round_up(int(possible.sum(1).max()), LENGTHS))
    order = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1.0)
    # Of a row that has fewer, the others stand where drafts can be made, and teach nothing.
    positions = order.topk(count, dim=1).indices.sort(dim=1).values
    taught = possible.gather(1, positions)
    return Anchors(torch.where(taught, positions, 0), taught)
