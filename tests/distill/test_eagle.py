"""An EAGLE-1 head is taught the target's distribution and its state, learns, and is saved as other servers read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lessons import RECIPE, new_lesson
from safetensors.torch import load_file

from graphspec.architectures.target import DecoderTarget
from graphspec.building import resolve_pair
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.batch import Hits, collate
from graphspec.distill.conversations import Conversation
from graphspec.distill.methods.eagle.drafts import draft_config
from graphspec.distill.methods.eagle.loss import loss, unrolled
from graphspec.distill.recipe import DraftShape
from graphspec.distill.training import Lesson, train
from graphspec.speculative_config import SpeculativeConfig


@pytest.fixture
def lesson(chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path) -> Lesson:
    return new_lesson("eagle", chatty, target, conversations, tmp_path)


def test_the_loss_is_a_tenth_of_the_cross_entropy_and_the_distance_of_the_states(lesson: Lesson) -> None:
    """Position by position, from the definition, in the unit of the cross entropy; padding changes nothing."""
    only = lesson.training[3]
    features = lesson.store.load(only)
    batch = collate([only], [features])
    recipe = replace(RECIPE, depth=2, decay=0.5)
    with torch.no_grad():
        found = float(loss(lesson.drafter, lesson.target, batch, recipe, torch.Generator()))
        outs = list(unrolled(lesson.drafter, lesson.target, batch.tokens, batch.final, depth=2))
        means = []
        for step, out in enumerate(outs):
            losses = []
            for anchor in range(len(only.prompt) - 1, len(only.tokens) - 2 - step):
                state = features.final[anchor + 1 + step].float()
                wanted, said = (lesson.target.logits(x[None, None])[0, 0] for x in (state, out[0, anchor]))
                entropy = -(wanted.softmax(-1) * said.log_softmax(-1)).sum()
                distance = (out[0, anchor] - state).abs()
                smooth = torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
                losses.append(10 * (0.1 * entropy + smooth))
            means.append(float(torch.stack(losses).mean()))
    assert found == pytest.approx((means[0] + 0.5 * means[1]) / 1.5, rel=1e-4)


def test_every_token_of_the_answer_behind_its_first_is_drafted(lesson: Lesson) -> None:
    only, hits = lesson.training[0], Hits()
    with torch.no_grad():
        batch = collate([only], [lesson.store.load(only)])
        loss(lesson.drafter, lesson.target, batch, RECIPE, torch.Generator(), hits=hits)
    count = len(only.answer) - 1  # the target itself says the first one
    assert hits.chains == [count, count - 1, count - 2]


def test_a_new_head_hands_the_targets_state_on(lesson: Lesson) -> None:
    features = lesson.store.load(lesson.training[0])
    batch = collate(lesson.training[:1], [features])
    with torch.no_grad():
        (out,) = unrolled(lesson.drafter, lesson.target, batch.tokens, batch.final, depth=1)
    difference = (out - batch.final)[0, : len(features.tokens)]
    assert difference.norm() < 0.3 * features.final.float().norm()


def test_a_saved_head_is_the_one_that_was_trained(lesson: Lesson, chatty: Path, tmp_path: Path) -> None:
    train(lesson, replace(RECIPE, epochs=1), tmp_path / "training", identity="a")
    config = draft_config(open_checkpoint(chatty).config, DraftShape())
    lesson.method.save(tmp_path / "draft", lesson.drafter, config)
    pair = resolve_pair(chatty, tmp_path / "draft", method="eagle")
    assert pair.architecture.name == "UnifiedEagleLlama3ForCausalLM"
    settings = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=3)
    loaded = pair.load_drafter(lesson.target, settings)
    for name, parameter in lesson.drafter.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter.detach().half().float(), rtol=0, atol=0)


def test_the_layout_is_the_communitys(lesson: Lesson, chatty: Path, tmp_path: Path) -> None:
    config = draft_config(open_checkpoint(chatty).config, DraftShape())
    lesson.method.save(tmp_path / "draft", lesson.drafter, config)
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (written["architectures"], written["num_hidden_layers"], written["bias"]) == (["LlamaForCausalLM"], 1, False)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "draft" / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": (64, 128),
        "layers.0.self_attn.q_proj.weight": (64, 64),
        "layers.0.self_attn.k_proj.weight": (32, 64),
        "layers.0.self_attn.v_proj.weight": (32, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "layers.0.post_attention_layernorm.weight": (64,),
    }
