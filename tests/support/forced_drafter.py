"""The module of the architecture that forced.py declares."""

from __future__ import annotations

import torch
from forced import LONGEST, TABLE
from torch import Tensor, nn

from graphspec.architectures import ops
from graphspec.architectures.state import StateSpec
from graphspec.architectures.step import Verified
from graphspec.architectures.target import DecoderTarget


class ForcedDrafter(nn.Module):
    """Proposes its table's tokens at the K positions after the pending one."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__()
        self.num_draft_tokens = num_draft_tokens

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec(name=TABLE, shape=("batch", LONGEST), dtype="int64"),)

    def propose(self, _: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        (table,) = states
        positions = verified.next_kv_len.unsqueeze(1) + 1 + torch.arange(self.num_draft_tokens)
        return ops.take_rows(table, positions.clamp(max=LONGEST - 1)), [table]
