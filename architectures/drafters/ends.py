"""The ends that drafts with taps have in common: an embedding and a head, each their own or the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..blocks.decoder import DecoderConfig, Embedding, Linear, Norm
from ..state import StateSpec, cache_specs
from ..target import DecoderTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a draft has of its own."""

    embedding: bool = False
    head_rows: int | None = None
    """Tokens that its head says; None: the target's head is read."""
    pruned: bool = False
    """Whether those are some of the target's, and d2t leads to them."""


class TappingDrafter(nn.Module):
    """A drafter that reads several layers of the target; a subclass puts its own between embedding and head."""

    offsets: Tensor
    """i64[Vd], where it is pruned: what is added to an id of the draft to get the target's."""

    def __init__(self, config: DecoderConfig, ends: Ends, *, taps: tuple[int, ...], num_draft_tokens: int) -> None:
        super().__init__()
        self.config, self.taps, self.num_draft_tokens, self.pruned = config, taps, num_draft_tokens, ends.pruned
        self.embedding = Embedding(config.vocabulary, config.hidden) if ends.embedding else None

    def _add_head(self, ends: Ends) -> None:
        """Behind the subclass's layers: parameters are drawn, and trainings resumed, in the order they are added."""
        self.norm = Norm(self.config.hidden, self.config.eps)
        self.head = Linear(self.config.hidden, ends.head_rows) if ends.head_rows else None
        if ends.pruned:
            self.register_buffer("offsets", torch.zeros(ends.head_rows or 0, dtype=torch.int64))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The draft's own caches: entries come from true target features only."""
        return cache_specs("draft", self.config)

    @property
    def says(self) -> Tensor:
        """i64[Vd]: the target's ids of the tokens that a pruned head says."""
        return torch.arange(len(self.offsets)) + self.offsets

    def embed(self, target: DecoderTarget, tokens: Tensor) -> Tensor:
        """tokens i64[B, T] → [B, T, H], by the draft's own table or the target's."""
        return target.embed(tokens) if self.embedding is None else self.embedding(tokens.clamp(min=0))

    def logits(self, target: DecoderTarget, normed: Tensor) -> Tensor:
        """What `norm` puts out [B, R, H] → [B, R, Vd]."""
        return target.logits(normed) if self.head is None else self.head(normed)

    def decide(self, target: DecoderTarget, normed: Tensor) -> Tensor:
        """The same → i64[B, R], the likeliest tokens in the target's ids."""
        tokens = self.logits(target, normed).argmax(dim=-1)
        if self.pruned:
            tokens = tokens + nn.functional.embedding(tokens, self.offsets.unsqueeze(1)).squeeze(-1)
        return tokens
