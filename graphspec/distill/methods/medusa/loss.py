"""What a batch teaches Medusa heads: what each says behind random positions of the answers."""

from __future__ import annotations

import torch
from torch import Tensor

from graphspec.architectures import gradients  # noqa: F401 - makes the operators differentiable
from graphspec.architectures.drafters.medusa import MedusaDrafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.anchors import taught_anchors
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.recipe import Recipe
from graphspec.distill.teaching import teach


def loss(
    drafter: MedusaDrafter,
    target: DecoderTarget,
    batch: Batch,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    hits: Hits | None = None,
) -> Tensor:
    """Mean cross entropy of the heads at `recipe.anchors` positions of each conversation; where hits are counted, at
    all of them."""
    anchors = taught_anchors(batch, recipe, generator, hits)
    rows = anchors.positions.unsqueeze(-1).expand(-1, -1, drafter.hidden)
    projections = [head.output.weight for head in drafter.heads if head.output is not None]
    return teach(
        target,
        batch,
        torch.arange(target.config.vocabulary),
        anchors,
        zip(drafter.features(batch.final.gather(1, rows)).unbind(1), projections, strict=True),
        decay=recipe.decay,
        hits=hits,
    )
