"""Prompt lookup inside the graph: the latest earlier occurrence of the newest tokens is copied on.

The token history lives on the device, so nothing waits for the host to search it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphspec.checkpoints import Checkpoint
from graphspec.speculative_config import SpeculativeConfig

from .. import ops
from ..state import StateSpec
from ..step import Verified
from ..target import DecoderTarget

NO_DRAFT = -1


class NgramDrafter(nn.Module):
    """Longest n-gram first (n_max … n_min), the latest match among equals, no match: K × -1."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_draft_tokens: int, n_min: int, n_max: int) -> None:
        super().__init__()
        self.num_draft_tokens, self.n_min, self.n_max = num_draft_tokens, n_min, n_max

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Every token of the row by position."""
        return (StateSpec(name="draft.history", shape=("batch", "capacity"), dtype="int64"),)

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        history = ops.write_history(states[0], verified.tokens, verified.kv_len)
        newest = verified.next_kv_len  # position of the pending token
        visible = history[:, : verified.key_positions.shape[0]]
        match = self._longest_latest(visible, newest, verified.key_positions)
        return self._copy_on(history, match, newest), [history]

    def _longest_latest(self, history: Tensor, newest: Tensor, positions: Tensor) -> Tensor:
        """Position of the last token of the best earlier match, or -1: i64[B, L], i64[B] → i64[B]."""
        length = history.shape[1]
        best = torch.full_like(newest, -1)
        matching = positions < newest.unsqueeze(1)
        shifted = history
        for n in range(1, self.n_max + 1):
            wanted = ops.take_rows(history, (newest - (n - 1)).clamp(min=0).unsqueeze(1))
            matching = matching & (shifted == wanted) & (positions >= n - 1)
            if n >= self.n_min:
                latest = torch.where(matching, positions, -1).amax(dim=1)
                best = torch.where(latest >= 0, latest, best)
            shifted = nn.functional.pad(history, (n, 0))[:, :length]
        return best

    def _copy_on(self, history: Tensor, match: Tensor, newest: Tensor) -> Tensor:
        """The K tokens after the match, repeating the stretch up to the newest where they run past it."""
        period = newest - match  # ≥ 1
        offsets = torch.arange(self.num_draft_tokens) % period.unsqueeze(1)
        drafts = ops.take_rows(history, match.unsqueeze(1) + 1 + offsets)
        return torch.where(match.unsqueeze(1) >= 0, drafts, NO_DRAFT)


def load_drafter(
    target: DecoderTarget, draft: Checkpoint | None, num_draft_tokens: int, config: SpeculativeConfig
) -> NgramDrafter:
    """A drafter without weights: K and the range of n come from the config."""
    return NgramDrafter(num_draft_tokens, config.ngram_min, config.ngram_max)
