"""Lessons of any method about one tiny target: what it says to random prompts, and its features of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.conversations import Conversation
from graphspec.distill.features import FeatureStore, target_pass
from graphspec.distill.methods import METHODS
from graphspec.distill.recipe import DraftShape, Recipe
from graphspec.distill.training import Lesson
from graphspec.distill.vocabulary import choose_vocabulary

RECIPE = Recipe(epochs=3, batch_size=2, depth=3, learning_rate=3e-3, seed=1)
CAPACITY = 96
KEPT = 64
"""Of 128 tokens, a draft with a vocabulary of its own says so many."""


def conversation(index: int, prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation(index=index, seed=0, temperature=0.0, category="", prompt=tuple(prompt), answer=tuple(answer))


def answered_prompts(target: DecoderTarget) -> list[Conversation]:
    """Prompts at random, and what the target says to them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(14):
        prompt = torch.randint(0, 128, (5 + index % 4,), generator=generator).tolist()
        answer: list[int] = []
        for _ in range(12 + index % 3):
            asked = conversation(index, prompt, [*answer, 0])
            (features,) = target_pass(target, [asked], (0,))
            answer.append(int(target.logits(features.final[None, -2:-1].float()).argmax()))
        made.append(conversation(index, prompt, answer))
    return made


def config_of(method: str, checkpoint: Path) -> dict[str, Any]:
    """config.json of the draft of a lesson."""
    chosen = METHODS[method]
    says = KEPT if "--draft-vocab-size" in chosen.options else 128
    return chosen.draft_config(open_checkpoint(checkpoint).config, DraftShape(), says, RECIPE.depth)


def new_lesson(
    method: str, checkpoint: Path, target: DecoderTarget, conversations: list[Conversation], folder: Path
) -> Lesson:
    """Ten of the conversations to train on, the rest held out; features are kept in `folder`."""
    opened, chosen = open_checkpoint(checkpoint), METHODS[method]
    kept = choose_vocabulary(conversations, KEPT if "--draft-vocab-size" in chosen.options else 128, 128)
    drafter = chosen.new_drafter(target, config_of(method, checkpoint), kept, seed=3)
    store = FeatureStore(folder / "features", opened, drafter.taps)
    store.compute(target, conversations, lambda _: None)
    return Lesson(
        method=chosen,
        target=target,
        drafter=drafter,
        store=store,
        training=conversations[:10],
        held_out=conversations[10:],
    )
