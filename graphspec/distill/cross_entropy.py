"""Cross entropy with a distribution, over vocabularies whose logits of a whole batch would not fit in memory.

Logits are made for some rows at a time, and their gradients at once: what is kept for the backward pass is as large as
what the head reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphspec.architectures import ops

from .padding import ROWS, padded_rows

CELLS = 1 << 24
"""Logits made at a time: 64 MiB in float32."""


def cross_entropy(read: Tensor, head: Tensor, teacher: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """→ the mean cross entropy of softmax(read · headᵀ) with its row of `teacher`, and the ids i64[M] most likely.

    read [M, H], head [Vd, H], teacher f32[D, Vd], rows i64[M] of it. Where gradients are on, `read` and `head` get
    theirs, if they require one.
    """
    if not torch.is_grad_enabled():
        read, head = read.detach(), head.detach()
    loss, said = _CrossEntropy.apply(read, head, teacher, rows)  # type: ignore[no-untyped-call]
    return loss, said


def distributions(final: Tensor, head: Tensor) -> Tensor:
    """f32[D, Vd]: what a head [Vd, H] thinks of states [D, H]."""
    states, weight = padded_rows(final), _in_products(head)
    result = states.new_empty((len(states), len(head)), dtype=torch.float32)
    for part in _parts(len(states), len(head)):
        result[part] = torch.softmax(ops.linear(states[part], weight).float(), dim=-1)
    return result[: len(final)]


class _CrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, head: Tensor, teacher: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        wants_read, wants_head, *_ = ctx.needs_input_grad
        count, weight = len(read), _in_products(head)
        read, rows = padded_rows(read), padded_rows(rows)
        by_read = torch.empty_like(read) if wants_read else None
        by_head = torch.zeros_like(head) if wants_head else None
        losses, said = [], []
        for part in _parts(len(read), len(head)):
            wanted = teacher[rows[part]]
            logits = ops.linear(read[part], weight).float()
            said.append(logits.argmax(-1))
            logs = torch.log_softmax(logits, dim=-1)
            losses.append(-torch.mul(wanted, logs, out=logits).sum(-1))
            if wants_read or wants_head:
                gradient = logs.exp_().sub_(wanted)
                if by_read is not None:
                    by_read[part] = gradient @ weight / count
                if by_head is not None:
                    by_head += gradient.T @ read[part] / count  # rows of padding are zero
        ids = torch.cat(said)[:count]
        ctx.save_for_backward(None if by_read is None else by_read[:count], by_head)
        ctx.mark_non_differentiable(ids)
        return torch.cat(losses)[:count].mean(), ids

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        by_read, by_head = (None if kept is None else kept * gradient for kept in ctx.saved_tensors)
        return by_read, by_head, None, None


def _parts(count: int, vocabulary: int) -> Iterator[slice]:
    size = max(ROWS, CELLS // vocabulary // ROWS * ROWS)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _in_products(head: Tensor) -> Tensor:
    """As autocast would read it, once for all rows."""
    return head.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else head
