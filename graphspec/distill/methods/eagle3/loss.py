"""What a batch teaches an EAGLE-3 head: every unrolled draft against the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.batch import Batch, Hits
from graphspec.distill.recipe import Recipe
from graphspec.distill.teaching import teach
from graphspec.distill.unroll import Head, columns, unroll


def loss(
    drafter: Eagle3Drafter,
    target: DecoderTarget,
    batch: Batch,
    recipe: Recipe,
    generator: torch.Generator,  # noqa: ARG001 - every position is taught
    *,
    hits: Hits | None = None,
) -> Tensor:
    """Mean cross entropy of the unrolls at every position of the answers (teaching.teach)."""
    assert drafter.head is not None
    anchors, head = columns(batch), drafter.head.weight
    first = int(anchors.positions[0, 0])
    outs = unrolled(drafter, target, batch.tokens, batch.taps, depth=recipe.depth, first=first)
    return teach(
        target,
        batch,
        drafter.says,
        anchors,
        ((drafter.norm(out), head) for out in outs),
        decay=recipe.decay,
        hits=hits,
    )


def unrolled(
    drafter: Eagle3Drafter, target: DecoderTarget, tokens: Tensor, taps: Tensor, *, depth: int, first: int = 0
) -> Iterator[Tensor]:
    """`unroll` of tokens i64[B, N] and taps [B, N, m · H]."""
    head = Head(
        embed=partial(drafter.embed, target),
        join=drafter.first.join,
        attention=drafter.first.attention,
        feed_forward=drafter.first.feed_forward,
        feature=drafter.norm if drafter.norm_output else _as_it_is,
        rotary=drafter.rotary,
    )
    return unroll(head, tokens, drafter.fuse_taps(taps), depth=depth, first=first)


def _as_it_is(out: Tensor) -> Tensor:
    return out
