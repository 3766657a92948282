"""Few shapes: oneDNN compiles a kernel for every shape of a product that it meets, and keeps it.

A training whose batches each have a length of their own, and each another number of rows for the head, meets new shapes
in every step. Of products by oneDNN (those in bfloat16; measured with it for float32, hidden size 64): 0.4 MB for each
of the 1,024 that its cache holds, some of them for good whatever the cache holds (uxlfoundation/oneDNN#489 and #1757),
and a heap that they cut in pieces: from 480 to 1,530 MB in 160 steps, and growing. With the paddings here 840 MB after
75 steps and no more after 400, and a step takes less than half the time. Products that never change cost 7 % more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LENGTHS = 16
"""Texts are padded to multiples of this."""
ROWS = 64
"""What a head reads is."""


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


def side_by_side(texts: Sequence[Tensor]) -> Tensor:
    """[N, …] each → [B, N, …], padded behind; attention is causal, so padding behind a text changes nothing in it."""
    length = round_up(max(len(text) for text in texts), LENGTHS)
    result = texts[0].new_zeros((len(texts), length, *texts[0].shape[1:]))
    for row, text in zip(result, texts, strict=True):
        row[: len(text)] = text
    return result


def padded_rows(x: Tensor) -> Tensor:
    """x [M, …] with rows of zeros behind."""
    return torch.cat((x, x.new_zeros((round_up(len(x), ROWS) - len(x), *x.shape[1:]))))
