"""Many blocks of one text in one pass, each as serving would run it.

    block at n    x_n, mask, …, mask at positions n … n+K      sees the features of 0 … n-1, and itself    → n+1 … n+K

The layers, norms and weights are the drafter's own; only the keys that attention sees are laid out differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphspec.architectures import gradients  # noqa: F401 - makes the operators differentiable
from graphspec.architectures.blocks.decoder import Attention
from graphspec.architectures.drafters.dflash import DFlashDrafter
from graphspec.architectures.target import DecoderTarget


def run_blocks(drafter: DFlashDrafter, target: DecoderTarget, tokens: Tensor, taps: Tensor, starts: Tensor) -> Tensor:
    """Outputs [B, A, R, H] of the last layer, of blocks whose known token stands at `starts` i64[B, A].

    tokens i64[B, N], taps [B, N, m · H].
    """
    batch, count = starts.shape
    rows, length = drafter.block_size, tokens.shape[1]
    context = drafter.context(taps)
    behind = drafter.rotary(torch.arange(length).unsqueeze(0))
    at = drafter.rotary((starts.unsqueeze(-1) + torch.arange(rows)).reshape(batch, -1))
    mask = torch.where(torch.arange(length) < starts.unsqueeze(-1), 0.0, float("-inf"))
    blocks = drafter.block(tokens.gather(1, starts).reshape(-1, 1)).reshape(batch, -1)
    x = drafter.embed(target, blocks)
    for layer in drafter.layers:
        q, k, v = layer.attention.project(layer.normed(x), *at)
        _, keys, values = layer.attention.project(context, *behind)
        x = layer.feed_forward(x + _attend(layer.attention, q, k, v, keys, values, mask))
    return x.reshape(batch, count, rows, -1)


def _attend(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """q [B, heads, A · R, D] over the keys [B, kv, N, D] that mask f32[B, A, N] shows each block, and over the block's
    own rows of k [B, kv, A · R, D] → [B, A · R, H]."""
    batch, count, length = mask.shape
    kv, dim = attention.kv_heads, q.shape[-1]
    grouped = q.reshape(batch, kv, -1, count, q.shape[2] // count, dim)  # [B, kv, G, A, R, D]
    own_keys, own_values = (heads.reshape(batch, kv, count, -1, dim) for heads in (k, v))
    behind = torch.einsum("bkgard,bknd->bkgarn", grouped, keys) * attention.scale + mask[:, None, None, :, None]
    beside = torch.einsum("bkgard,bkasd->bkgars", grouped, own_keys) * attention.scale
    weights = torch.softmax(torch.cat((behind, beside), dim=-1).float(), dim=-1)
    mixed = torch.einsum("bkgarn,bknd->bkgard", weights[..., :length], values)
    mixed = mixed + torch.einsum("bkgars,bkasd->bkgard", weights[..., length:], own_values)
    output: Tensor = attention.output(mixed.flatten(3, 4).flatten(1, 2).transpose(1, 2).flatten(2))
    return output
