"""Gradients of the operators that a drafter's training goes through; imported for training only.

The values stay those of ops.py: what is trained is what a build traces. Attention is not here, because training
attends to other keys than serving does (graphspec.distill.methods).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops

Gradients = tuple[Tensor | None, ...]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.constants = tuple(value for value in inputs if not isinstance(value, Tensor))


def _linear(ctx: Any, gradient: Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, *bound = ctx.needs_input_grad
    by_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2) if wants_weight else None
    return gradient @ weight if wants_x else None, by_weight, *[None for _ in bound]


def _rms_norm(ctx: Any, gradient: Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    (eps,) = ctx.constants
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * scale
    inner = gradient * weight
    by_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return by_x.to(x.dtype), (gradient * normed).flatten(0, -2).sum(0), None


def _split_heads(ctx: Any, gradient: Tensor) -> Gradients:
    return gradient.transpose(1, 2).flatten(2), None


def _rotary(ctx: Any, gradient: Tensor) -> Gradients:
    """The rotation backwards."""
    _, cos, sin = ctx.saved_tensors
    return ops.rotary(gradient, cos, -sin), None, None


def _swiglu(ctx: Any, gradient: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    gate, up = x.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return (torch.cat((gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu), dim=-1),)


for _operator, _backward in (
    (ops.linear, _linear),
    (ops.rms_norm, _rms_norm),
    (ops.split_heads, _split_heads),
    (ops.rotary, _rotary),
    (ops.swiglu, _swiglu),
):
    _operator.register_autograd(_backward, setup_context=_save)
