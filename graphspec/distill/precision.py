"""The type that matrix products are computed in; weights, sums of the residual stream and losses stay float32."""

from __future__ import annotations

import torch

from graphspec.architectures import ops
from graphspec.errors import ConfigError

PRECISIONS = ("float32", "bfloat16")

ops.linear.register_autocast("cpu", torch.bfloat16)


def check_precision(precision: str) -> None:
    """Raises ConfigError for one that is not known."""
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision!r} is not known; use {' or '.join(PRECISIONS)}")


def products_in(precision: str) -> torch.autocast:
    """A context in which products are computed in `precision`."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
