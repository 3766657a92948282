"""What a batch teaches an EAGLE-1 head: every unrolled draft against the target's distribution and its state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graphspec.architectures.drafters.eagle import EagleDrafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.recipe import Recipe
from graphspec.distill.teaching import teach
from graphspec.distill.unroll import Head, columns, unroll

IMITATION = 10.0
"""As v_w 1.0 (the state) is to p_w 0.1 (the tokens) in SafeAILab/EAGLE's eagle/train/main.py."""


def loss(
    drafter: EagleDrafter,
    target: DecoderTarget,
    batch: Batch,
    recipe: Recipe,
    generator: torch.Generator,  # noqa: ARG001 - every position is taught
    *,
    hits: Hits | None = None,
) -> Tensor:
    """Mean cross entropy of the unrolls at every position of the answers, and how far each is from the target's state.

    SafeAILab's heads are trained on the first unroll, with noise on what they read in place of their own errors.
    """
    anchors = columns(batch)
    first = int(anchors.positions[0, 0])
    outs = unrolled(drafter, target, batch.tokens, batch.final, depth=recipe.depth, first=first)
    return teach(
        target,
        batch,
        torch.arange(target.config.vocabulary),
        anchors,
        ((out, target.head_weight) for out in outs),
        decay=recipe.decay,
        imitation=IMITATION,
        hits=hits,
    )


def unrolled(
    drafter: EagleDrafter, target: DecoderTarget, tokens: Tensor, final: Tensor, *, depth: int, first: int = 0
) -> Iterator[Tensor]:
    """`unroll` of tokens i64[B, N] and the target's states [B, N, H], as its head reads them."""
    (layer,) = drafter.layers

    def join(embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        x = drafter.fuse(embedded, feature)
        return x, layer.normed(x)

    head = Head(
        embed=target.embed,
        join=join,
        attention=layer.attention,
        feed_forward=layer.feed_forward,
        feature=drafter.feature,
        rotary=drafter.rotary,
    )
    return unroll(head, tokens, final, depth=depth, first=first)
