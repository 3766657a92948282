"""Moves outliers of activations into the weights that read them, before both become 8-bit integers.

A row of activations shares one step of its grid, so one large channel leaves the others few steps. Dividing channel
j by s_j where it is made, and multiplying column j of the weight that reads it, changes nothing but the grids:
SmoothQuant (Xiao et al., 2022, arXiv 2211.10438), equation 4 with α = 1/2. The divisions are folded into norms and
rows of weights, so they cost nothing at run time; and s_j is a power of two, so that the model in floating point is
the same to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphspec.architectures.blocks.decoder import Linear
from graphspec.architectures.state import layer_caches
from graphspec.architectures.target import DecoderTarget

_TOKENS = 128
"""Random ones: which channels are large hardly depends on the text."""


@torch.no_grad()
def smooth(target: DecoderTarget) -> None:
    """Rescales the target's weights in place."""
    folds = [fold for layer in target.layers for fold in layer.foldable()]
    largest = _largest_inputs(target, [fold.reader for fold in folds])
    for fold in folds:
        weight = fold.reader.weight
        scale = _scale(largest[fold.reader], weight.abs().amax(dim=0))
        weight.mul_(scale)
        for maker in fold.makers:
            maker[-len(scale) :].div_(scale.view(-1, *[1] * (maker.dim() - 1)))


def _scale(activations: Tensor, weights: Tensor) -> Tensor:
    """s_j of every channel, from the largest values [in] of both; 1 for a channel that is not used."""
    ratio = activations / weights
    used = (activations > 0) & (weights > 0)
    exponents = torch.where(used, ratio, 1.0).log2() / 2
    centred = torch.where(used, exponents - exponents[used].mean(), 0.0)
    return torch.exp2(centred.round())


def _largest_inputs(target: DecoderTarget, readers: list[Linear]) -> dict[Linear, Tensor]:
    """The largest magnitude of each channel that reaches each projection, [in]."""
    largest: dict[Linear, Tensor] = {}

    def record(reader: Linear, inputs: tuple[Tensor, ...]) -> None:
        largest[reader] = inputs[0].abs().flatten(0, -2).amax(dim=0)

    hooks = [reader.register_forward_pre_hook(record) for reader in readers]
    length = min(_TOKENS, target.capacity - 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocabulary, (1, length), generator=generator)
    caches = [torch.zeros(spec.sizes(1, length + 1)) for spec in target.states]
    try:
        target(
            tokens,
            target.window(torch.zeros(1, dtype=torch.int64), tokens, torch.arange(length + 1)),
            layer_caches(caches),
        )
    finally:
        for hook in hooks:
            hook.remove()
    return largest
