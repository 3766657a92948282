"""The operators' gradients are those of what they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphspec.architectures import gradients, ops

CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (ops.linear, ((2, 3, 4), (5, 4))),
    "linear with a bound": (lambda x, w: ops.linear(x, w, 4.0), ((2, 3, 4), (5, 4))),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), ((2, 3, 4), (4,))),
    "split_heads": (lambda x: ops.split_heads(x, 2), ((2, 3, 4),)),
    "rotary": (
        lambda x: ops.rotary(x, torch.linspace(-1, 1, 12).view(2, 3, 2), torch.linspace(0, 1, 12).view(2, 3, 2)),
        ((2, 1, 3, 4),),
    ),
    "swiglu": (ops.swiglu, ((2, 3, 8),)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_the_slope_along_a_direction(name: str) -> None:
    """Central differences in float32: operators compute their statistics in it."""
    assert gradients  # registers them
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = [random(shape).requires_grad_() for shape in shapes]
    weights = random(tuple(function(*inputs).shape))
    (function(*inputs) * weights).sum().backward()  # type: ignore[no-untyped-call]
    for index, value in enumerate(inputs):
        direction, small = random(tuple(value.shape)), 1e-2
        ahead, behind = (
            function(*[x.detach() + sign * small * direction if i == index else x for i, x in enumerate(inputs)])
            for sign in (1, -1)
        )
        slope = ((ahead.double() - behind.double()) * weights).sum() / (2 * small)
        assert value.grad is not None
        torch.testing.assert_close((value.grad * direction).sum().double(), slope, rtol=1e-2, atol=1e-2)


def test_a_weight_that_is_not_trained_gets_no_gradient() -> None:
    x, weight = torch.ones(1, 2, 3, requires_grad=True), torch.ones(4, 3)
    ops.linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
