"""The basis of a residual stream that was turned (graphspec.export.rotation), and the way back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotation(nn.Module):
    """x ↦ x · Q, with Q orthogonal; norms inside have no weights, since what reads them took them over."""

    matrix: Tensor
    norm: Tensor

    def __init__(self, matrix: Tensor, norm: Tensor) -> None:
        """matrix Q [H, H]; norm [H]: the weight that the last norm had."""
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.register_buffer("norm", norm)

    def into(self, x: Tensor) -> Tensor:
        """[..., H] as the turned layers see it."""
        return torch.matmul(x, self.matrix)

    def back(self, x: Tensor) -> Tensor:
        """[..., m · H], m turned states side by side, as they were."""
        size = len(self.matrix)
        return torch.matmul(x.reshape(*x.shape[:-1], -1, size), self.matrix.T).flatten(-2)

    def final(self, normed: Tensor) -> Tensor:
        """The last norm's output [..., H] without its weight, turned → with it, as it was."""
        return self.back(normed) * self.norm

    def normed(self, final: Tensor) -> Tensor:
        """The inverse of `final`; a channel that the norm's weight makes 0 is not to be had back."""
        return self.into(final * torch.where(self.norm == 0, 0.0, 1 / self.norm))
