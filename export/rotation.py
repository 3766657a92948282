"""Turns the target's residual stream by an orthogonal matrix, before it becomes 8-bit integers.

A few channels of a trained model are a hundred times larger than the others, and a row of activations shares one
step of its grid. In a turned basis no channel stands out: a row that RMSNorm has made has a root mean square of 1 and
values close to normally distributed, so its grid needs no look at the row. That is QuaRot (Ashkboos et al., 2024,
arXiv 2404.00456), sections 3 and 4 without the rotations at run time: norms are folded into what reads them, the
matrix into weights. In floating point the model is the same, up to rounding.

The matrix is a Kronecker product of small ones, so that turning the weights of a large model takes little time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graphspec.architectures.blocks.decoder import Attention, DecoderLayer, Linear
from graphspec.architectures.blocks.rotation import Rotation
from graphspec.architectures.target import DecoderTarget

BOUND = 4.0
"""Where the grid of a normed row ends, in root mean squares: of 4,096 normally distributed values a quarter of one
lies beyond. On SmolLM2 the grids of 4, 5 and 6 lose 0.0140, 0.0158 and 0.0182 nats of Kullback-Leibler divergence."""
_LARGEST_FACTOR = 64


@torch.no_grad()
def rotate(target: DecoderTarget) -> None:
    """Turns the target's weights in place; what drafters see of it stays as it was."""
    factors = _factors(target.config.hidden)
    target.rotation = Rotation(_turned(torch.eye(target.config.hidden), factors), target.norm.weight.clone())
    for layer in target.layers:
        _rotate_layer(layer, factors)
    head = Linear(target.config.hidden, target.config.vocabulary)
    head.weight = nn.Parameter(target.head_weight.clone(), requires_grad=False)  # a tied one stays the embedding
    _turn_reader(head, target.norm.weight, factors)
    target.head = head


def _rotate_layer(layer: DecoderLayer, factors: list[Tensor]) -> None:
    assert layer.input_norm is not None
    for norm, reader in ((layer.input_norm, layer.attention.qkv), (layer.mlp_norm, layer.mlp.gate_up)):
        _turn_reader(reader, norm.weight, factors)
    _turn_values(layer.attention)
    for writer in (layer.attention.output, layer.mlp.down):
        writer.weight.copy_(_turned(writer.weight.T, factors).T)
        if writer.bias is not None:
            writer.bias.copy_(_turned(writer.bias, factors))


def _turn_values(attention: Attention) -> None:
    """A turn of its own for what the heads mix: values come in turned, and the projection behind them turns back."""
    size = attention.output.weight.shape[1] // attention.heads
    rows, factors = attention.kv_heads * size, _factors(size)
    values = attention.qkv.weight[-rows:].reshape(attention.kv_heads, size, -1)  # [kv, D, inputs]
    attention.qkv.weight[-rows:] = _turned(values.transpose(1, 2), factors).transpose(1, 2).flatten(0, 1)
    if attention.qkv.bias is not None:
        attention.qkv.bias[-rows:] = _turned(attention.qkv.bias[-rows:].reshape(-1, size), factors).flatten()
    output = attention.output.weight
    output.copy_(_turned(output.reshape(len(output), -1, size), factors).flatten(1))


def _turn_reader(reader: Linear, norm: nn.Parameter, factors: list[Tensor]) -> None:
    """What reads a norm takes over its weight."""
    reader.weight.copy_(_turned(reader.weight * norm, factors))
    reader.bound = BOUND
    norm.fill_(1)


def _factors(size: int) -> list[Tensor]:
    """Orthogonal matrices whose Kronecker product is of `size`: an odd one, drawn, and Hadamard's.

    Rows of the product are signed at random: without that a row of equal values would stay one large value.
    """
    odd, even = size, 1
    while odd % 2 == 0:
        odd, even = odd // 2, even * 2
    generator = torch.Generator().manual_seed(0)
    drawn, _ = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
    factors = [drawn.float()]
    while even > 1:
        part = min(even, _LARGEST_FACTOR)
        factors.append(_hadamard(part))
        even //= part
    signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1
    return [signs, *factors]


def _hadamard(size: int) -> Tensor:
    matrix: Tensor = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _turned(x: Tensor, factors: list[Tensor]) -> Tensor:
    """x [..., size] · Q."""
    signs, *parts = factors
    turned = (x * signs).reshape(*x.shape[:-1], *(len(part) for part in parts))
    for axis, part in enumerate(parts, start=-len(parts)):
        turned = (turned.movedim(axis, -1) @ part).movedim(-1, axis)
    return turned.reshape(x.shape)
