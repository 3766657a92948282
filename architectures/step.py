"""The fused step, once for every target, drafter and width: verify → accept → draft.

    tokens ──▶ target ──▶ logits ──▶ accept ──▶ committed tokens, y
                 │ hidden                │
                 └──────▶ drafter ◀──────┘ ──▶ K new drafts

B rows, T tokens read of each row, R positions at which the target is asked, K drafts, S cache capacity,
L ≤ S visible cache positions. A row's tokens are n_known known ones (the pending token; for a prompt chunk,
its tokens) followed by the drafts to verify. Positions are absolute: a row's first token stands at kv_len, its
pending token at next_kv_len, and the drafts that a drafter runs after it reach position next_kv_len + K - 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from graphspec.checkpoints.listing import listed
from graphspec.errors import UnsupportedError

from . import ops
from .blocks.decoder import Window
from .state import FloatType, StateSpec, flatten, layer_caches
from .target import DecoderTarget, Hidden


class StepInputs(NamedTuple):
    """What the host, or the step before, gives a step."""

    tokens: Tensor
    """i64[B, T]: known tokens, then drafts (-1: none); padding after n_tokens."""
    kv_len: Tensor
    """i64[B]: tokens already in the target's cache."""
    n_tokens: Tensor
    """i64[B]: how many of the T tokens are real."""
    n_known: Tensor
    """i64[B]: how many of those are known; 1 for a row that decodes."""
    next_token: Tensor
    """i64[B]: the prompt token after this chunk, or -1: commit what the target says."""
    verify_offsets: Tensor
    """i64[R] = r … W, r ≤ 0: where the target is asked, from the last known token on; 0 and above verify. Below 0
    stand known tokens (a prompt's), whose rows are only asked; r > -n_known in every row."""
    key_positions: Tensor
    """i64[L] = 0 … L-1; L ≥ kv_len + T + 1 in every row."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    """[B]: sampling of the row; temperature 0 is argmax."""
    uniform: Tensor
    """f32[B, S, 1]: the row's random numbers by absolute position."""


class StepOutputs(NamedTuple):
    """What the host reads, and what the next step starts from."""

    accepted: Tensor
    """i64[B]: drafts accepted."""
    committed: Tensor
    """i64[B, R]: accepted drafts, the target's own token, then -1; at offsets below 0, known tokens."""
    next_tokens: Tensor
    """i64[B, K+1]: the pending token and K drafts."""
    next_kv_len: Tensor
    """i64[B]."""
    logits: Tensor
    """f32[B, R, V]: the target's, before temperature and filters; a backend may leave them out of its graphs."""
    states: list[Tensor]


class Verified(NamedTuple):
    """What a drafter starts from: the window just run, and how much of it was committed."""

    window: Window
    tokens: Tensor
    """i64[B, T+1]: the row's committed tokens from position kv_len on, then the pending one; garbage after."""
    hidden: Hidden
    last: Tensor
    """i64[B]: index in the window of the last token now in the cache."""
    kv_len: Tensor
    next_kv_len: Tensor
    """i64[B]: cache lengths before and after the step."""
    key_positions: Tensor


class Drafter(Protocol):
    """Proposes K tokens after the pending one."""

    num_draft_tokens: int
    taps: tuple[int, ...]

    @property
    def states(self) -> tuple[StateSpec, ...]: ...

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """→ drafts i64[B, K] (-1: none) and the updated states."""
        ...


class FusedStep(nn.Module):
    """verify → accept → draft of one target and drafter."""

    def __init__(self, target: DecoderTarget, drafter: Drafter, *, greedy: bool = False) -> None:
        """`greedy`: argmax only (--use-greedy-acceptance); the sampling inputs are not read then."""
        super().__init__()
        self.greedy = greedy
        self.dtype: FloatType = "float32"
        self.target = target
        self.drafter: Drafter = drafter

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The target's, then the drafter's."""
        specs = (*self.target.states, *self.drafter.states)
        return tuple(spec if spec.dtype == "int64" else replace(spec, dtype=self.dtype) for spec in specs)

    def cast(self, dtype: FloatType) -> Self:
        """Computes in `dtype` from now on: weights and caches are cast, rotary tables stay float32.

        Raises UnsupportedError naming the weights that `dtype` cannot hold.
        """
        self.dtype = dtype
        limit = torch.finfo(getattr(torch, dtype)).max
        if large := [name for name, value in self.named_parameters() if value.numel() and value.abs().max() > limit]:
            raise UnsupportedError(f"{dtype} holds no value beyond {limit:g}, and these weights do: {listed(large)}")
        for parameter in self.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        return self

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self.drafter.num_draft_tokens

    def forward(self, inputs: StepInputs, states: list[Tensor]) -> StepOutputs:
        count = len(self.target.states)
        window = self.target.window(inputs.kv_len, inputs.tokens, inputs.key_positions)
        hidden, caches = self.target(inputs.tokens, window, layer_caches(states[:count]), taps=self.drafter.taps)

        rows = inputs.n_known.unsqueeze(1) - 1 + inputs.verify_offsets  # [B, R]
        asked = rows.clamp(max=inputs.tokens.shape[1] - 1)
        logits = self.target.own_logits(ops.take_rows(hidden.normed, asked))
        judged = self._judge(inputs, logits, asked)
        drafts = ops.take_rows(inputs.tokens, (rows + 1).clamp(max=inputs.tokens.shape[1] - 1))
        is_draft = rows + 1 < inputs.n_tokens.unsqueeze(1)
        accepted = _accepted(is_draft & (drafts == judged), inputs.verify_offsets)
        pending = ops.take_rows(judged, accepted.unsqueeze(1) - inputs.verify_offsets[:1])  # [B, 1]
        pending = torch.where(inputs.next_token.unsqueeze(1) >= 0, inputs.next_token.unsqueeze(1), pending)

        last = inputs.n_known - 1 + accepted
        next_kv_len = inputs.kv_len + last + 1
        proposed, drafter_states = self.drafter.propose(
            self.target,
            Verified(
                window=window,
                tokens=_with_pending(inputs.tokens, last, pending),
                hidden=hidden,
                last=last,
                kv_len=inputs.kv_len,
                next_kv_len=next_kv_len,
                key_positions=inputs.key_positions,
            ),
            states[count:],
        )
        return StepOutputs(
            accepted=accepted,
            committed=_committed(drafts, pending, accepted, inputs.verify_offsets),
            next_tokens=torch.cat((pending, proposed), dim=1),
            next_kv_len=next_kv_len,
            logits=logits,
            states=[*flatten(caches), *drafter_states],
        )

    def _judge(self, inputs: StepInputs, logits: Tensor, asked: Tensor) -> Tensor:
        """The target's own token after each of the R rows asked, i64[B, R].

        The token at absolute position p depends on the target's distribution at p and uniform[row, p] alone:
        that is why the output is the same at any width, batch and chunking.
        """
        if self.greedy:
            return logits.argmax(dim=-1)
        uniform = ops.take_rows(inputs.uniform, inputs.kv_len.unsqueeze(1) + asked + 1).squeeze(-1)
        return ops.sample(logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, uniform)


def _accepted(matches: Tensor, offsets: Tensor) -> Tensor:
    """Length of the run of matches at offset 0 and after it in each row: bool[B, R], i64[R] → i64[B].

    The last of the R positions never holds a draft, so there is always a first mismatch.
    """
    return torch.where(matches | (offsets < 0), offsets.shape[0], offsets).amin(dim=1)


def _committed(drafts: Tensor, pending: Tensor, accepted: Tensor, offsets: Tensor) -> Tensor:
    """The tokens after those asked up to the accepted drafts, then the pending token, then -1: i64[B, R]."""
    after = torch.where(offsets == accepted.unsqueeze(1), pending, -1)
    return torch.where(offsets < accepted.unsqueeze(1), drafts, after)


def _with_pending(tokens: Tensor, last: Tensor, pending: Tensor) -> Tensor:
    """The window's tokens and the pending one written after index last[b]: i64[B, T] → i64[B, T+1]."""
    extended = torch.cat((tokens, pending), dim=1)
    index = torch.arange(extended.shape[1])
    return torch.where(index == (last + 1).unsqueeze(1), pending, extended)
