"""The training loop: AdamW on batches of cached features, with checkpoints that go on as if never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphspec.architectures.target import DecoderTarget
from graphspec.errors import CheckpointError, ConfigError

from .batch import Batch, Hits, collate
from .conversations import Conversation
from .features import FeatureStore
from .files import whole_file
from .method import Method
from .precision import products_in
from .recipe import Recipe

_CHECKPOINT = "training.pt"
_SAVED = ("belongs_to", "drafter", "optimizer", "step", "loss")
_BUCKET = 16
"""Batches whose conversations are sorted by length together: little padding, still shuffled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training is."""

    step: int
    steps: int
    loss: float
    """Of the last batches, averaged."""
    tokens_per_step: float | None
    """Estimated on the held-out conversations, when it was last asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What is trained, and on what."""

    method: Method
    target: DecoderTarget
    drafter: Any
    """The method's."""
    store: FeatureStore
    training: Sequence[Conversation]
    held_out: Sequence[Conversation]


def train(
    lesson: Lesson,
    recipe: Recipe,
    folder: Path,
    *,
    identity: str,
    checkpoint_every: int = 50,
    stop_after: int | None = None,
    on_step: Callable[[Progress], None] = lambda _: None,
) -> float | None:
    """Trains the drafter in place, and returns the estimated tokens per step on the held-out conversations.

    Goes on from the checkpoint in `folder`, if there is one of this `identity` (of data, target and sizes) and
    recipe; raises CheckpointError for one of another. `stop_after` ends at that step, for tests.
    """
    if not lesson.training:
        raise ConfigError("there is no conversation to train on: make more, or hold out fewer")
    parameters = list(lesson.drafter.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.95)
    )
    steps = recipe.epochs * -(-len(lesson.training) // recipe.batch_size)
    state = _Checkpoint(folder / _CHECKPOINT, {"identity": identity, "recipe": asdict(recipe)})
    done, loss = state.restore(lesson.drafter, optimizer)
    estimate: float | None = None
    for step, batch in enumerate(_batches(lesson, recipe)):
        if step < done:
            continue
        if step == stop_after:
            return 0.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, steps)
        value = _update(lesson, recipe, optimizer, batch(), _drawing(recipe, step))
        if not math.isfinite(value):
            raise ConfigError(
                f"the loss of step {step + 1} is {value}: this training leads nowhere; give a lower --learning-rate, "
                f"and delete {state.path}"
            )
        loss = value if step == 0 else 0.95 * loss + 0.05 * value
        if (step + 1) % checkpoint_every == 0 or step + 1 == steps:
            state.save(lesson.drafter, optimizer, step + 1, loss)
            estimate = evaluate(lesson, recipe)
        on_step(Progress(step=step + 1, steps=steps, loss=loss, tokens_per_step=estimate))
    return evaluate(lesson, recipe) if estimate is None else estimate


def evaluate(lesson: Lesson, recipe: Recipe) -> float | None:
    """Estimated tokens per step on the held-out conversations, at a width of the recipe's depth; None: there are
    none."""
    hits = Hits()
    with torch.no_grad(), products_in(recipe.precision):
        for start in range(0, len(lesson.held_out), recipe.batch_size):
            batch = _load(lesson.store, lesson.held_out[start : start + recipe.batch_size])
            lesson.method.loss(lesson.drafter, lesson.target, batch, recipe, _drawing(recipe, start), hits=hits)
    return hits.tokens_per_step if lesson.held_out else None


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Up in a line, down in a cosine to a tenth."""
    warmup = max(1, round(recipe.warmup_share * steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return recipe.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def _update(
    lesson: Lesson, recipe: Recipe, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator
) -> float:
    optimizer.zero_grad()
    with products_in(recipe.precision):
        loss = lesson.method.loss(lesson.drafter, lesson.target, batch, recipe, generator)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(lesson.drafter.parameters(), recipe.clip)
        optimizer.step()
    return float(loss.detach())


def _drawing(recipe: Recipe, step: int) -> torch.Generator:
    """What a loss draws from at a step: the same whether or not the training was stopped before it."""
    return torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)


def _batches(lesson: Lesson, recipe: Recipe) -> Iterator[Callable[[], Batch]]:
    """Batches of all epochs, each made when it is called: their order follows from the seed alone."""
    for epoch in range(recipe.epochs):
        order = torch.randperm(
            len(lesson.training), generator=torch.Generator().manual_seed(recipe.seed * 1000 + epoch)
        )
        shuffled = [lesson.training[int(index)] for index in order]
        size = recipe.batch_size * _BUCKET
        for start in range(0, len(shuffled), size):
            bucket = sorted(shuffled[start : start + size], key=lambda conversation: len(conversation.tokens))
            for first in range(0, len(bucket), recipe.batch_size):
                chosen = bucket[first : first + recipe.batch_size]
                yield lambda chosen=chosen: _load(lesson.store, chosen)  # type: ignore[misc]


def _load(store: FeatureStore, conversations: Sequence[Conversation]) -> Batch:
    return collate(conversations, [store.load(conversation) for conversation in conversations])


class _Checkpoint:
    """Weights, optimiser and place in the data, in one file that is whole or old."""

    def __init__(self, path: Path, belongs_to: dict[str, Any]) -> None:
        self.path, self._belongs_to = path, belongs_to

    def restore(self, drafter: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """→ steps done and the loss then; 0 if there is no checkpoint."""
        if not self.path.exists():
            return 0, 0.0
        try:
            saved = torch.load(self.path, weights_only=True)
            belongs_to, weights, optimised, step, loss = (saved[name] for name in _SAVED)
        except Exception as error:  # a damaged file can fail in any way
            raise CheckpointError(
                f"{self.path} is no checkpoint of a training; delete the file to begin anew"
            ) from error
        if belongs_to != self._belongs_to:
            raise CheckpointError(
                f"{self.path} is of a training with other data or another recipe; "
                "repeat that command to go on with it, or delete the file to begin anew"
            )
        drafter.load_state_dict(weights)
        optimizer.load_state_dict(optimised)
        return int(step), float(loss)

    def save(self, drafter: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
        parts = (self._belongs_to, drafter.state_dict(), optimizer.state_dict(), step, loss)
        # Given a path, torch writes in a way that does not say why it cannot.
        with whole_file(self.path) as partial, partial.open("wb") as file:
            torch.save(dict(zip(_SAVED, parts, strict=True)), file)
