"""The training-time test: a head runs on its own outputs, at every position of a text at once.

    unroll 0    feature of p, token p+1                      sees features 0 … p             → token p+2
    unroll j    its own output of unroll j-1, token p+1+j    sees features 0 … p, and its    → token p+2+j
                                                             own unrolls 1 … j at p

So column p is the chain that serving would draft after p, given that the target says what the text says. The
layer, norms and weights are the drafter's own; only the keys that attention sees are laid out differently.
EAGLE-3 is trained so (arXiv 2503.01840), and so are EAGLE-1 heads that shall draft far (HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphspec.architectures import gradients  # noqa: F401 - makes the operators differentiable
from graphspec.architectures.blocks.decoder import Attention
from graphspec.architectures.blocks.rope import RotaryTable

from .batch import Batch
from .padding import LENGTHS
from .teaching import Anchors


class Head(NamedTuple):
    """A drafter of one layer, in the parts that are run apart here."""

    embed: Callable[[Tensor], Tensor]
    """Tokens i64[B, T] → [B, T, H]."""
    join: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Embeddings and features [B, T, H] → the residual [B, T, H], and what attention reads."""
    attention: Attention
    feed_forward: Callable[[Tensor], Tensor]
    """What follows attention and its residual: [B, T, H] → [B, T, H]."""
    feature: Callable[[Tensor], Tensor]
    """What the next draft reads of that."""
    rotary: RotaryTable


def columns(batch: Batch) -> Anchors:
    """Every position from about the first that drafts on; those that do not draft teach nothing."""
    first = int(batch.anchors.any(0).nonzero()[0]) // LENGTHS * LENGTHS
    positions = torch.arange(first, batch.tokens.shape[1]).expand(len(batch.tokens), -1)
    return Anchors(positions, batch.anchors[:, first:])


def unroll(head: Head, tokens: Tensor, feature: Tensor, *, depth: int, first: int = 0) -> Iterator[Tensor]:
    """Outputs [B, N - first, H] of unrolls 0 … depth-1, at positions `first` and after.

    tokens i64[B, N], feature [B, N, H]. Position p of unroll j means something where token p+1+j exists.
    """
    length = tokens.shape[1]
    positions = torch.arange(length)
    mask = _causal(positions[first:], positions)
    embedded = head.embed(functional.pad(tokens[:, 1:], (0, depth)))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(depth):
        # The features before `first` are keys to those after, and start no chain of their own.
        begin = first if step else 0
        at = positions[begin:] + step
        residual, joined = head.join(embedded[:, begin + step : length + step], feature)
        q, k, v = head.attention.project(joined, *head.rotary(at.unsqueeze(0)))
        keys.append(k)
        values.append(v)
        skipped = first - begin
        mixed = _attend(head.attention, q[:, :, skipped:], keys, values, mask)
        out = head.feed_forward(residual[:, skipped:] + mixed)
        yield out
        feature = head.feature(out)


def _causal(queries: Tensor, positions: Tensor) -> Tensor:
    """f32[Q, N]: 0 where a query sees a position, else -inf."""
    return torch.where(positions <= queries.unsqueeze(1), 0.0, float("-inf"))


def _attend(attention: Attention, q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """q [B, heads, Q, D] over the features' keys up to each position, and over its own column of later unrolls."""
    grouped = q.reshape(q.shape[0], attention.kv_heads, -1, *q.shape[2:])  # [B, kv, G, Q, D]
    causal = torch.einsum("bkgqd,bkld->bkgql", grouped, keys[0]) * attention.scale + mask
    own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) * attention.scale for key in keys[1:]]
    weights = torch.softmax(torch.cat((causal, *own), dim=-1).float(), dim=-1)
    length = mask.shape[1]
    mixed = torch.einsum("bkgql,bkld->bkgqd", weights[..., :length], values[0])
    for index, value in enumerate(values[1:]):
        mixed = mixed + weights[..., length + index, None] * value.unsqueeze(2)
    output: Tensor = attention.output(mixed.flatten(1, 2).transpose(1, 2).flatten(2))
    return output
