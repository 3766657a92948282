"""A target as graphspec and as transformers load it, and drafts of one checked against the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import reference
import torch
from eager import EagerLoop, Row, Turn
from reference import TargetStates
from torch import Tensor

from graphspec.architectures.step import FusedStep
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.registry import registered, target_kind
from graphspec.resolution import resolve
from graphspec.speculative_config import SpeculativeConfig

CAPACITY = 64
K = 3
WINDOWS = tuple((width, right) for right in range(K + 1) for width in range(K, right - 1, -1))
"""Every verify width with every number of right drafts in it."""
ANSWER = sum(right + 1 for _, right in WINDOWS) + 4 * (K + 1)
"""More tokens than a row commits in `check_drafts`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Twin:
    """One checkpoint, loaded twice."""

    path: Path
    target: DecoderTarget
    model: Any
    """transformers', in float64."""
    whole: Callable[[tuple[int, ...]], tuple[int, ...]]
    """A prompt and transformers' greedy answer of ANSWER tokens."""
    states: Callable[[tuple[int, ...]], TargetStates]
    """What transformers computes for a prompt and its answer."""

    @property
    def embedding(self) -> Tensor:
        """f64[V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor:
        """f64[V, H]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()


def load_twin(path: Path, *, capacity: int = CAPACITY) -> Twin:
    """Loads a directory both ways; answers are computed once."""
    checkpoint = open_checkpoint(path)
    model = reference.load_model(path)

    def whole(prompt: tuple[int, ...]) -> tuple[int, ...]:
        return (*prompt, *reference.greedy(model, prompt, ANSWER))

    def states(prompt: tuple[int, ...]) -> TargetStates:
        return reference.target_states(model, kept.whole(prompt))

    kept = Twin(
        path=path,
        target=target_kind(checkpoint).load(checkpoint, capacity=capacity),
        model=model,
        whole=cache(whole),
        states=cache(states),
    )
    return kept


def load_step(twin: Twin, draft: Path | None, method: str, *, num_draft_tokens: int = K, **settings: Any) -> FusedStep:
    """The step that the pair resolves to; `settings` go into its SpeculativeConfig."""
    checkpoints = open_checkpoint(twin.path), open_checkpoint(draft) if draft else None
    drafter = resolve(*checkpoints, method, None, registered()).architecture.drafter
    values = {"speculative_method": method, "num_speculative_tokens": num_draft_tokens, **settings}
    config = SpeculativeConfig.parse(values)
    return FusedStep(twin.target, drafter.load(twin.target, checkpoints[1], num_draft_tokens, config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What a drafter should propose."""

    tokens: Sequence[int]
    logits: Tensor | None = None
    """f64[K, draft vocabulary]."""


def chosen(logits: Tensor, offsets: Tensor | None = None) -> Drafts:
    """The most probable tokens; `offsets` is d2t of a pruned vocabulary."""
    best = logits.argmax(dim=-1)
    return Drafts(tokens=(best if offsets is None else best + offsets[best]).tolist(), logits=logits)


Expected = Callable[[tuple[int, ...], TargetStates], Drafts]
"""From the tokens x_0 … x_n and the target's states of the whole sequence to what should be drafted."""


def check_drafts(
    step: FusedStep,
    twin: Twin,
    prompts: Sequence[tuple[int, ...]],
    chunks: Sequence[int],
    expected: Expected,
    *,
    own_drafts: int = 0,
) -> None:
    """After every chunk and every verified window, the drafts are those expected, in value.

    Row i starts its WINDOWS i windows further on, so rows of one step accept different numbers; at the end come
    `own_drafts` steps that verify what the drafter proposed. Committed tokens are transformers' own throughout.
    """
    rows = [Row(prompt=prompt, chunk=chunk) for prompt, chunk in zip(prompts, chunks, strict=True)]
    loop = EagerLoop(step, rows, capacity=CAPACITY)

    def check(turns: Sequence[Turn]) -> None:
        for row, turn in zip(rows, turns, strict=True):
            assert turn.known == twin.whole(row.prompt)[: len(turn.known)]
            wanted = expected(turn.known, twin.states(row.prompt))
            if wanted.logits is not None:
                assert turn.draft_logits is not None
                scale = float(wanted.logits.abs().max())
                torch.testing.assert_close(turn.draft_logits.double(), wanted.logits, rtol=0, atol=1e-3 * scale)
            assert list(turn.next_tokens) == [turn.known[-1], *wanted.tokens]

    while any(row.prefilling for row in rows):
        check(loop.advance(0))
    for index in range(len(WINDOWS)):
        width = WINDOWS[index][0]
        right = [(WINDOWS[index][1] + offset) % (width + 1) for offset in range(len(rows))]
        turns = loop.advance(width, [_drafts(twin, row, width, count) for row, count in zip(rows, right, strict=True)])
        assert [turn.accepted for turn in turns] == right
        check(turns)
    for _ in range(own_drafts):
        check(loop.advance(K))


def _drafts(twin: Twin, row: Row, width: int, right: int) -> list[int]:
    """The answer's next tokens, `right` of them right and the others not."""
    after = twin.whole(row.prompt)[len(row.tokens) : len(row.tokens) + width]
    return [token if index < right else (token + 1) % 128 for index, token in enumerate(after)]
