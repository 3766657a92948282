"""A training learns, is the same for a seed, and goes on as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lessons
import pytest
import torch
from lessons import RECIPE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphspec.architectures.target import DecoderTarget
from graphspec.building import resolve_pair
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.batch import Batch, Hits, collate
from graphspec.distill.conversations import Conversation
from graphspec.distill.drafts import taps
from graphspec.distill.methods import METHODS
from graphspec.distill.methods.eagle3.drafts import draft_config, save_draft
from graphspec.distill.methods.eagle3.loss import loss, unrolled
from graphspec.distill.recipe import DraftShape, Recipe
from graphspec.distill.training import Lesson, Progress, learning_rate, train
from graphspec.errors import CheckpointError, ConfigError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig


@pytest.fixture
def lesson(chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path) -> Lesson:
    return new_lesson(chatty, target, conversations, tmp_path)


def new_lesson(chatty: Path, target: DecoderTarget, conversations: list[Conversation], folder: Path) -> Lesson:
    return lessons.new_lesson("eagle3", chatty, target, conversations, folder)


def batch_loss(lesson: Lesson, batch: Batch, *, depth: int, decay: float, hits: Hits | None = None) -> float:
    recipe = replace(RECIPE, depth=depth, decay=decay)
    return float(loss(lesson.drafter, lesson.target, batch, recipe, torch.Generator(), hits=hits))


def weights(lesson: Lesson) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in lesson.drafter.state_dict().items()}


def test_the_loss_falls(lesson: Lesson, tmp_path: Path) -> None:
    seen: list[Progress] = []
    train(lesson, replace(RECIPE, epochs=12), tmp_path, identity="a", on_step=seen.append)
    assert (seen[0].step, seen[-1].step, seen[-1].steps) == (1, 60, 60)
    assert seen[-1].loss < 0.75 * seen[0].loss
    assert seen[-1].tokens_per_step is not None


def test_a_seed_decides_the_training(
    chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    lessons = [new_lesson(chatty, target, conversations, tmp_path) for _ in range(3)]
    for index, (each, seed) in enumerate(zip(lessons, (1, 1, 2), strict=True)):
        train(each, replace(RECIPE, epochs=1, seed=seed), tmp_path / str(index), identity="a")
    one, again, other = map(weights, lessons)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_a_finished_training_is_not_done_again(lesson: Lesson, tmp_path: Path) -> None:
    estimate = train(lesson, RECIPE, tmp_path, identity="a")
    seen: list[Progress] = []
    assert train(lesson, RECIPE, tmp_path, identity="a", on_step=seen.append) == estimate
    assert not seen


@pytest.mark.parametrize(("identity", "epochs"), [("b", 3), ("a", 4)])
def test_a_checkpoint_of_other_data_or_another_recipe_is_refused(
    lesson: Lesson, tmp_path: Path, identity: str, epochs: int
) -> None:
    train(lesson, RECIPE, tmp_path, identity="a")
    with pytest.raises(CheckpointError, match="with other data or another recipe"):
        train(lesson, replace(RECIPE, epochs=epochs), tmp_path, identity=identity)


def test_a_damaged_checkpoint_is_named(lesson: Lesson, tmp_path: Path) -> None:
    (tmp_path / "training.pt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"training\.pt is no checkpoint .* delete the file"):
        train(lesson, RECIPE, tmp_path, identity="a")


def test_a_file_of_another_kind_is_no_checkpoint(lesson: Lesson, tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "training.pt")
    with pytest.raises(CheckpointError, match=r"training\.pt is no checkpoint .* delete the file"):
        train(lesson, RECIPE, tmp_path, identity="a")


def test_a_training_that_leads_nowhere_ends(lesson: Lesson, tmp_path: Path) -> None:
    """Its drafter would be made of what is no number."""
    with torch.no_grad():
        lesson.drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"the loss of step 1 is nan: .* a lower --learning-rate, and delete"):
        train(lesson, RECIPE, tmp_path, identity="a", checkpoint_every=1)
    assert not (tmp_path / "training.pt").exists()


def test_without_held_out_conversations_there_is_no_estimate(lesson: Lesson, tmp_path: Path) -> None:
    assert train(replace(lesson, held_out=[]), replace(RECIPE, epochs=1), tmp_path, identity="a") is None


def test_nothing_to_train_on_is_an_error(lesson: Lesson, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no conversation to train on"):
        train(replace(lesson, training=[]), RECIPE, tmp_path, identity="a")


def test_the_rate_rises_in_a_line_and_falls_to_a_tenth() -> None:
    recipe = Recipe(learning_rate=1e-3, warmup_share=0.1)
    rates = [learning_rate(recipe, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == max(rates) == pytest.approx(1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("changes", [{"epochs": 0}, {"batch_size": 0}, {"depth": 0}, {"learning_rate": 0.0}])
def test_a_recipe_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must"):
        replace(RECIPE, **changes)


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shapes of the products that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(function).partition(".")[2].startswith(("mm", "bmm", "addmm", "linear")):
            self.seen.add((str(function), *(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_other_lengths_meet_the_same_shapes(
    method: str, chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    each = lessons.new_lesson(method, chatty, target, conversations, tmp_path)
    assert len({len(conversation.tokens) for conversation in each.training}) > 3
    shapes: list[set[tuple[Any, ...]]] = []
    with _Shapes() as met:
        train(each, replace(RECIPE, anchors=3), tmp_path, identity="a", on_step=lambda _: shapes.append({*met.seen}))
    assert len(shapes) > 10
    assert shapes[0] == shapes[-2] != set()  # behind the last step the held-out ones are looked at


def test_padding_does_not_change_a_conversations_loss(lesson: Lesson) -> None:
    """In a batch, the loss of two is the mean over both their drafts."""
    pair = [lesson.training[0], lesson.training[2]]
    one, other, both = (collate(each, [lesson.store.load(c) for c in each]) for each in (pair[:1], pair[1:], pair))
    hits = [Hits(), Hits(), Hits()]
    with torch.no_grad():
        losses = [
            batch_loss(lesson, batch, depth=1, decay=1.0, hits=counted)
            for batch, counted in zip((one, other, both), hits, strict=True)
        ]
    rows = [int(counted.chains[0]) for counted in hits]
    assert rows[2] == rows[0] + rows[1]
    assert hits[2].right[0] == hits[0].right[0] + hits[1].right[0]
    known = [sum(token in kept_of(lesson) for token in c.answer[1:]) for c in pair]
    expected = (losses[0] * known[0] + losses[1] * known[1]) / sum(known)
    assert losses[2] == pytest.approx(expected, rel=1e-4)


def test_the_loss_is_the_cross_entropy_with_the_targets_distribution(lesson: Lesson) -> None:
    """Position by position, from the definition."""
    (only,) = lesson.training[3:4]
    features, kept = lesson.store.load(only), lesson.drafter.says
    batch = collate([only], [features])
    with torch.no_grad():
        found = batch_loss(lesson, batch, depth=2, decay=0.5)
        outs = list(unrolled(lesson.drafter, lesson.target, batch.tokens, batch.taps, depth=2))
        means = []
        for step, out in enumerate(outs):
            losses = []
            for anchor in range(len(only.prompt) - 1, len(only.tokens) - 2 - step):
                if only.tokens[anchor + 2 + step] in kept.tolist():
                    logits = lesson.target.logits(features.final[None, anchor + 1 + step, None].float())[0, 0, kept]
                    assert lesson.drafter.head is not None
                    said = lesson.drafter.head(lesson.drafter.norm(out[0, anchor]))
                    losses.append(-(logits.softmax(-1) * said.log_softmax(-1)).sum())
            means.append(float(torch.stack(losses).mean()))
    assert found == pytest.approx((means[0] + 0.5 * means[1]) / 1.5, rel=1e-4)


def kept_of(lesson: Lesson) -> set[int]:
    return set(lesson.drafter.says.tolist())


def test_only_tokens_of_the_answer_behind_its_first_are_drafted(lesson: Lesson) -> None:
    (only,) = lesson.training[:1]
    batch = collate([only], [lesson.store.load(only)])
    hits = Hits()
    with torch.no_grad():
        batch_loss(lesson, batch, depth=3, decay=1.0, hits=hits)
    count = len(only.answer) - 1  # the target itself says the first one
    assert hits.chains == [count, count - 1, count - 2]


@pytest.mark.parametrize(("layers", "read"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3))])
def test_three_different_layers_are_read(layers: int, read: tuple[int, ...]) -> None:
    assert taps(layers, reader="EAGLE-3") == read


def test_a_target_of_three_layers_is_refused(chatty: Path) -> None:
    with pytest.raises(UnsupportedError, match="a target of 3 has too few"):
        draft_config({**open_checkpoint(chatty).config, "num_hidden_layers": 3}, DraftShape(), 64)


def test_a_saved_draft_is_the_one_that_was_trained(lesson: Lesson, chatty: Path, tmp_path: Path) -> None:
    train(lesson, replace(RECIPE, epochs=1), tmp_path / "training", identity="a")
    config = draft_config(open_checkpoint(chatty).config, DraftShape(), 64)
    save_draft(tmp_path / "draft", lesson.drafter, config)
    pair = resolve_pair(chatty, tmp_path / "draft", method="eagle3")
    assert pair.architecture.name == "UnifiedEagle3Llama3ForCausalLM"
    settings = SpeculativeConfig(speculative_method="eagle3", num_speculative_tokens=3)
    loaded = pair.architecture.drafter.load(lesson.target, pair.draft, 3, settings)
    assert loaded.taps == lesson.drafter.taps
    assert torch.equal(loaded.offsets, lesson.drafter.offsets)
    for name, parameter in lesson.drafter.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter.detach().half().float(), rtol=0, atol=0)
