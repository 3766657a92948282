"""EAGLE-3's training-time test: the drafter runs on its own outputs, at every position of a text at once.

    unroll 0    feature of p, token p+1                      sees features 0 … p             → token p+2
    unroll j    its own output of unroll j-1, token p+1+j    sees features 0 … p, and its    → token p+2+j
                                                             own unrolls 1 … j at p

So column p is the chain that serving would draft after p, given that the target says what the text says. The
layers, norms and weights are the drafter's own; only the keys that attention sees are laid out differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from graphspec.architectures import gradients  # noqa: F401 - makes the operators differentiable
from graphspec.architectures.blocks.decoder import Attention
from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.target import DecoderTarget


def unroll(
    drafter: Eagle3Drafter, target: DecoderTarget, tokens: Tensor, taps: Tensor, *, depth: int, first: int = 0
) -> Iterator[Tensor]:
    """Outputs [B, N - first, H] of unrolls 0 … depth-1, at positions `first` and after.

    tokens i64[B, N], taps [B, N, m · H]. Position p of unroll j means something where token p+1+j exists.
    """
    length = tokens.shape[1]
    positions = torch.arange(length)
    mask = _causal(positions[first:], positions)
    feature = drafter.fuse_taps(taps)
    embedded = drafter.embed(target, functional.pad(tokens[:, 1:], (0, depth)))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(depth):
        # The features before `first` are keys to those after, and start no chain of their own.
        begin = first if step else 0
        at = positions[begin:] + step
        residual, joined = drafter.first.join(embedded[:, begin + step : length + step], feature)
        q, k, v = drafter.first.attention.project(joined, *drafter.rotary(at.unsqueeze(0)))
        keys.append(k)
        values.append(v)
        skipped = first - begin
        mixed = _attend(drafter.first.attention, q[:, :, skipped:], keys, values, mask)
        out = drafter.first.feed_forward(residual[:, skipped:] + mixed)
        yield out
        feature = drafter.norm(out) if drafter.norm_output else out


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
