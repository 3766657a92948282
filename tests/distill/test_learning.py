"""What every method has in common: it learns, the engine accepts what it learnt, and a stop changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lessons import RECIPE, config_of, new_lesson

from graphspec.architectures.target import DecoderTarget
from graphspec.building import build
from graphspec.distill.conversations import Conversation
from graphspec.distill.measuring import measure
from graphspec.distill.methods import METHODS
from graphspec.distill.training import Lesson, Progress, evaluate, train

TEXTS = 2


@pytest.fixture(params=METHODS)
def lesson(
    request: pytest.FixtureRequest,
    chatty: Path,
    target: DecoderTarget,
    conversations: list[Conversation],
    tmp_path: Path,
) -> Lesson:
    """Of some texts, which it is also asked."""
    each = new_lesson(request.param, chatty, target, conversations, tmp_path)
    return replace(each, held_out=each.training[:TEXTS], training=each.training[:TEXTS])


def accepted(lesson: Lesson, chatty: Path, folder: Path) -> float:
    """Tokens of a step that the engine measures on the texts' prompts, without an end before theirs."""
    name = lesson.method.name
    lesson.method.save(folder / "draft", lesson.drafter, config_of(name, chatty))
    build(
        model=chatty,
        draft_model_path=folder / "draft",
        out=folder / "bundle",
        encoding="float32",
        speculative_method=name,
        num_speculative_tokens=RECIPE.depth,
        max_length=64,
        max_batch_size=1,
    )
    prompts = [conversation.prompt for conversation in lesson.held_out]
    measured = measure(folder / "bundle", prompts, max_new_tokens=12, num_threads=1)
    assert (measured.prompts, measured.width) == (TEXTS, RECIPE.depth)
    return measured.acceptance.mean_tokens_per_step


@pytest.mark.slow
def test_what_is_learnt_by_heart_is_accepted_by_the_engine(lesson: Lesson, chatty: Path, tmp_path: Path) -> None:
    before, seen, head = evaluate(lesson, RECIPE), list[Progress](), lesson.target.head_weight.clone()
    recipe = replace(RECIPE, epochs=150, anchors=6)
    after = train(lesson, recipe, tmp_path, identity="a", checkpoint_every=1000, on_step=seen.append)
    assert before is not None
    assert after is not None
    assert before < 2.5 < 3.5 < after <= 4.0
    assert seen[-1].loss < 0.75 * seen[0].loss
    assert torch.equal(lesson.target.head_weight, head)
    assert accepted(lesson, chatty, tmp_path) > 2.5


@pytest.mark.slow
def test_in_bfloat16_it_is_learnt_as_well(lesson: Lesson, tmp_path: Path) -> None:
    before = evaluate(lesson, RECIPE)
    recipe = replace(RECIPE, epochs=150, anchors=6, precision="bfloat16")
    after = train(lesson, recipe, tmp_path, identity="a", checkpoint_every=1000)
    assert before is not None
    assert after is not None
    assert before < 2.5 < 3.5 < after <= 4.0


@pytest.mark.parametrize("method", METHODS)
def test_a_training_that_was_stopped_ends_as_one_that_was_not(
    method: str, chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    """What it draws is drawn again: places in the texts, and their order."""
    whole, stopped, resumed = (new_lesson(method, chatty, target, conversations, tmp_path) for _ in range(3))
    recipe = replace(RECIPE, epochs=2, anchors=3)
    whole_seen, seen = list[Progress](), list[Progress]()
    train(whole, recipe, tmp_path / "whole", identity="a", checkpoint_every=4, on_step=whole_seen.append)
    train(stopped, recipe, tmp_path / "parts", identity="a", checkpoint_every=4, stop_after=6)
    train(resumed, recipe, tmp_path / "parts", identity="a", checkpoint_every=4, on_step=seen.append)
    assert seen[0].step == 5
    assert [progress.loss for progress in seen] == [progress.loss for progress in whole_seen[4:]]
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(value, resumed.drafter.state_dict()[name])
