"""The eager fused step, driven as an engine drives it: rows prefill in chunks, then verify their drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from graphspec.architectures.state import StateSpec
from graphspec.architectures.step import FusedStep, StepInputs, StepOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a row's tokens are drawn; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: Tensor | None = None
    """f32[S]: by absolute position."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One request."""

    prompt: tuple[int, ...]
    chunk: int
    """Prompt tokens a prefill step runs."""
    sampling: Sampling = field(default_factory=Sampling)
    kv_len: int = 0
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was committed: the last one is pending once the prompt has run."""
    drafts: list[int] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are left to run."""
        return self.kv_len < len(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one step did to one row."""

    known: tuple[int, ...]
    """Every token up to the pending one; in a prompt, up to the token after the chunk."""
    accepted: int
    committed: tuple[int, ...]
    """All columns from offset 0 on, -1 included."""
    next_tokens: tuple[int, ...]
    """The pending token and K drafts."""
    logits: Tensor
    """f32[R, V]: the target's, where it was asked."""
    draft_logits: Tensor | None
    """f32[K, draft vocabulary]: what the drafter chose its tokens from; None: it computes none."""


class EagerLoop:
    """Rows and their states over one FusedStep; positions beyond a row's length hold garbage, as on a device."""

    def __init__(
        self, step: FusedStep, rows: Sequence[Row], *, capacity: int, padding: int = -1, visible: int | None = None
    ) -> None:
        """`padding` fills a row's columns after its tokens; `visible` positions are looked at, if not just enough."""
        self.step, self.rows, self.capacity = step, list(rows), capacity
        self.padding, self.visible = padding, visible
        self.known_asked = 0
        """Known tokens before the last one at which the target is asked too."""
        self.states = [initial_state(spec, len(rows), capacity) for spec in step.states]
        for row in self.rows:
            row.tokens = list(row.prompt)

    def prefill(self) -> list[list[Turn]]:
        """Steps until no row has prompt left; rows that are done early go on at width 0."""
        turns = []
        while any(row.prefilling for row in self.rows):
            turns.append(self.advance(0))
        return turns

    def advance(self, width: int, drafts: Sequence[Sequence[int] | None] | None = None) -> list[Turn]:
        """One step for all rows: a chunk of its prompt, or `width` drafts, its own unless given."""
        given = [row.drafts if own is None else own for row, own in zip(self.rows, drafts or [None] * 99, strict=False)]
        known = [self._known(row) for row in self.rows]
        asked = [[] if row.prefilling else list(own)[:width] for row, own in zip(self.rows, given, strict=True)]
        length = max(len(k) + len(d) for k, d in zip(known, asked, strict=True))
        tokens = [(k + d + [self.padding] * length)[:length] for k, d in zip(known, asked, strict=True)]
        inputs = self._inputs(tokens, known, asked, width)
        with recorded_drafts(self.step) as calls, torch.no_grad():
            outputs = self.step(inputs, self.states)
        self.states = outputs.states
        logits = torch.cat(calls, dim=1) if calls else None
        return [self._take(index, outputs, inputs, logits) for index in range(len(self.rows))]

    def _known(self, row: Row) -> list[int]:
        """The chunk of a prompt, or the pending token."""
        return list(row.prompt[row.kv_len : row.kv_len + row.chunk]) if row.prefilling else row.tokens[-1:]

    def _inputs(
        self, tokens: list[list[int]], known: list[list[int]], drafts: list[list[int]], width: int
    ) -> StepInputs:
        rows = self.rows
        after = [row.kv_len + len(k) for row, k in zip(rows, known, strict=True)]
        following = [row.prompt[a] if a < len(row.prompt) else -1 for row, a in zip(rows, after, strict=True)]
        visible = max(row.kv_len for row in rows) + len(tokens[0]) + 1
        assert visible <= self.capacity
        return StepInputs(
            tokens=torch.tensor(tokens),
            kv_len=torch.tensor([row.kv_len for row in rows]),
            n_tokens=torch.tensor([len(k) + len(d) for k, d in zip(known, drafts, strict=True)]),
            n_known=torch.tensor([len(k) for k in known]),
            next_token=torch.tensor(following),
            verify_offsets=torch.arange(-self.known_asked, width + 1),
            key_positions=torch.arange(self.visible or visible),
            temperature=torch.tensor([row.sampling.temperature for row in rows]),
            top_k=torch.tensor([row.sampling.top_k for row in rows]),
            top_p=torch.tensor([row.sampling.top_p for row in rows]),
            min_p=torch.tensor([row.sampling.min_p for row in rows]),
            uniform=torch.stack([self._uniform(row) for row in rows]).unsqueeze(-1),
        )

    def _uniform(self, row: Row) -> Tensor:
        return torch.zeros(self.capacity) if row.sampling.uniform is None else row.sampling.uniform

    def _take(self, index: int, outputs: StepOutputs, inputs: StepInputs, logits: Tensor | None) -> Turn:
        row = self.rows[index]
        accepted, committed = int(outputs.accepted[index]), outputs.committed[index, self.known_asked :].tolist()
        row.kv_len = int(outputs.next_kv_len[index])
        pending, *row.drafts = outputs.next_tokens[index].tolist()
        if int(inputs.next_token[index]) < 0:
            row.tokens += committed[: accepted + 1]
            assert row.tokens[-1] == pending
        return Turn(
            known=tuple(row.tokens[: row.kv_len + 1]),
            accepted=accepted,
            committed=tuple(committed),
            next_tokens=(pending, *row.drafts),
            logits=outputs.logits[index],
            draft_logits=None if logits is None else logits[index],
        )


def initial_state(spec: StateSpec, batch: int, capacity: int) -> Tensor:
    """A state before its first step, holding what other requests could have left there: finite, and wrong."""
    return torch.full(spec.sizes(batch, capacity), 3, dtype=getattr(torch, spec.dtype))


@contextmanager
def recorded_drafts(step: FusedStep) -> Iterator[list[Tensor]]:
    """Collects the logits [B, 1, V] that the drafter chooses from, in order, wherever its head is."""
    calls: list[Tensor] = []
    heads = [getattr(step.drafter, "head", None), *(head.output for head in getattr(step.drafter, "heads", ()))]
    model = getattr(step.drafter, "model", None)
    if own := [head for head in heads if head is not None]:
        hooks = [head.register_forward_hook(lambda _module, _inputs, output: calls.append(output)) for head in own]
        yield calls
        for hook in hooks:
            hook.remove()
        return
    owner = model or step.target
    inner = owner.logits

    def logits(hidden: Tensor) -> Tensor:
        calls.append(inner(hidden))
        return calls[-1]

    with mock.patch.object(owner, "logits", logits):
        yield calls
