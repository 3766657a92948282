"""Heads in training are the heads of serving, each is taught the token it says there, and they are learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_medusa
import torch
from eager import EagerLoop, Row
from lessons import RECIPE, new_lesson
from safetensors.torch import load_file

from graphspec.architectures.step import FusedStep
from graphspec.architectures.target import DecoderTarget
from graphspec.building import resolve_pair
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.batch import Batch, Hits, collate
from graphspec.distill.conversations import Conversation
from graphspec.distill.features import FeatureStore
from graphspec.distill.methods.medusa.drafts import draft_config
from graphspec.distill.methods.medusa.loss import loss
from graphspec.distill.training import Lesson, train
from graphspec.speculative_config import SpeculativeConfig

K, CAPACITY = 3, 64
PROMPTS = ((5, 93, 17, 64, 17, 101, 2), (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))


@pytest.fixture
def lesson(chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path) -> Lesson:
    return new_lesson("medusa", chatty, target, conversations, tmp_path)


def batch_of(lesson: Lesson, *chosen: Conversation) -> Batch:
    return collate(chosen, [lesson.store.load(conversation) for conversation in chosen])


def test_heads_begin_as_the_targets_own(lesson: Lesson) -> None:
    batch = batch_of(lesson, *lesson.training[:2])
    with torch.no_grad():
        features = lesson.drafter.features(batch.final)
        said = [head.project(read) for head, read in zip(lesson.drafter.heads, features.unbind(1), strict=True)]
    assert len(said) == RECIPE.depth
    for logits in said:
        torch.testing.assert_close(logits, lesson.target.logits(batch.final))


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_what_a_head_says_in_training_is_what_serving_drafts(tmp_path: Path, prompt: tuple[int, ...]) -> None:
    draft = tiny_medusa.save_medusa(tmp_path / "heads", tiny_medusa.medusa_tensors(blocks=2))
    pair = resolve_pair(tiny.save_llama(tmp_path / "target", layers=2), draft)
    target = pair.architecture.target.load(pair.target, capacity=CAPACITY)
    config = SpeculativeConfig(speculative_method="medusa", num_speculative_tokens=K)
    drafter = pair.load_drafter(target, config)
    (turn,) = EagerLoop(FusedStep(target, drafter), [Row(prompt=prompt, chunk=3)], capacity=CAPACITY).prefill()[-1]
    asked = Conversation(index=0, seed=0, temperature=0.0, category="", prompt=prompt, answer=(1, 2, 3))
    store = FeatureStore(tmp_path / "features", pair.target, ())
    store.compute(target, [asked], lambda _: None)
    with torch.no_grad():
        features = drafter.features(store.load(asked).final.float().unsqueeze(0))[0, :, len(prompt) - 1]
        logits = torch.stack([head.project(row) for head, row in zip(drafter.heads, features, strict=True)])
    assert turn.draft_logits is not None
    torch.testing.assert_close(logits, turn.draft_logits, rtol=1e-2, atol=1e-2)  # features are kept in float16
    assert logits.argmax(-1).tolist() == list(turn.next_tokens[1:])


def test_held_out_drafts_are_counted_at_every_position(lesson: Lesson) -> None:
    hits, generator = Hits(), torch.Generator()
    with torch.no_grad():
        recipe = replace(RECIPE, anchors=2)
        loss(lesson.drafter, lesson.target, batch_of(lesson, lesson.training[0]), recipe, generator, hits=hits)
    count = len(lesson.training[0].answer) - 1  # the target itself says the first one
    assert hits.chains == [count, count - 1, count - 2]


def test_the_loss_is_the_cross_entropy_with_the_targets_distribution(lesson: Lesson) -> None:
    """Position by position, from the definition, in float64; heads that differ, since all begin alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lesson.drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    only = lesson.training[2]
    final = lesson.store.load(only).final.double()
    head, drafter = lesson.target.head_weight.double(), lesson.drafter
    weights = {name: value.detach().double() for name, value in drafter.named_parameters()}
    means = []
    for number in range(RECIPE.depth):
        rows = slice(number * tiny.HIDDEN, (number + 1) * tiny.HIDDEN)
        losses = []
        for anchor in range(len(only.prompt) - 1, len(only.tokens) - 2 - number):
            read = weights["first.weight"][rows] @ final[anchor] + weights["first.bias"][rows]
            said = weights[f"heads.{number}.output.weight"] @ (final[anchor] + read * torch.sigmoid(read))
            wanted = head @ final[anchor + 1 + number]
            losses.append(-(wanted.softmax(-1) * said.log_softmax(-1)).sum())
        means.append(float(torch.stack(losses).mean()))
    decays = [RECIPE.decay**number for number in range(RECIPE.depth)]
    expected = sum(decay * mean for decay, mean in zip(decays, means, strict=True)) / sum(decays)
    with torch.no_grad():
        found = float(loss(drafter, lesson.target, batch_of(lesson, only), RECIPE, torch.Generator()))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_loss_reaches_every_parameter(lesson: Lesson) -> None:
    loss(lesson.drafter, lesson.target, batch_of(lesson, *lesson.training[:2]), RECIPE, torch.Generator()).backward()  # type: ignore[no-untyped-call]
    for name, parameter in lesson.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_saved_heads_are_those_that_were_trained(lesson: Lesson, chatty: Path, tmp_path: Path) -> None:
    train(lesson, replace(RECIPE, epochs=1), tmp_path / "training", identity="a")
    config = draft_config(open_checkpoint(chatty).config, RECIPE.depth)
    lesson.method.save(tmp_path / "draft", lesson.drafter, config)
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (written["medusa_num_heads"], written["medusa_num_layers"]) == (K, 1)
    stored = load_file(tmp_path / "draft" / "medusa_lm_head.safetensors")
    shapes = {"0.linear.weight": [64, 64], "0.linear.bias": [64], "1.weight": [128, 64]}
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        f"{head}.{name}": shape for head in range(K) for name, shape in shapes.items()
    }
    pair = resolve_pair(chatty, tmp_path / "draft", method="medusa")
    assert pair.architecture.name == "UnifiedMedusaLlama3ForCausalLM"
    loaded = pair.load_drafter(lesson.target, SpeculativeConfig(speculative_method="medusa", num_speculative_tokens=K))
    for name, parameter in lesson.drafter.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter.detach().half().float(), rtol=0, atol=0)
