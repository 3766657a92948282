"""A separate draft LM with the target's vocabulary (checkpoints.md §4.10)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphspec.architecture import TargetKind
from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError
from graphspec.registry import target_kind
from graphspec.speculative_config import SpeculativeConfig

from .. import ops
from ..state import StateSpec, cache_specs, flatten, layer_caches
from ..step import Verified
from ..target import DecoderTarget, draft_window


class StandaloneDrafter(nn.Module):
    """Runs the draft LM over the committed tokens, the pending one included, then K-1 tokens of its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: DecoderTarget, num_draft_tokens: int) -> None:
        super().__init__()
        self.model, self.num_draft_tokens = model, num_draft_tokens

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The draft LM's own caches."""
        return cache_specs("draft", self.model.config)

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        window = self.model.window(verified.kv_len, verified.tokens, verified.key_positions)
        hidden, caches = self.model(verified.tokens, window, layer_caches(states))
        final = ops.take_rows(hidden.final, (verified.last + 1).unsqueeze(1))
        drafts, drafted = [self._best(final)], None
        cached = verified.next_kv_len + 1  # the pending token's keys are in the cache too
        for step in range(1, self.num_draft_tokens):
            position = verified.next_kv_len + step
            at = draft_window(self.model.rotary, position, cached, verified.key_positions)
            final, drafted = self.model.draft(drafts[-1], at, caches, drafted)
            drafts.append(self._best(final))
        return torch.cat(drafts, dim=1), flatten(caches)

    def _best(self, final: Tensor) -> Tensor:
        """final hidden [B, 1, H] → the most probable token i64[B, 1]."""
        return self.model.logits(final).argmax(dim=-1)


def load_drafter(
    target: DecoderTarget,
    draft: Checkpoint,
    num_draft_tokens: int,
    config: SpeculativeConfig,
    kind: TargetKind | None = None,
) -> StandaloneDrafter:
    """Loads the draft as a target of its own `kind`, by default the one that graphspec's own architectures and
    those of installed packages know. Raises CheckpointError if the vocabularies differ in size."""
    model = (kind or target_kind(draft)).load(draft, capacity=target.capacity)
    if model.config.vocabulary != target.config.vocabulary:
        raise CheckpointError(
            f"draft '{draft.name}' has a vocabulary of {model.config.vocabulary} tokens and the target one of "
            f"{target.config.vocabulary}: a standalone draft needs the target's vocabulary"
        )
    return StandaloneDrafter(model, num_draft_tokens)
