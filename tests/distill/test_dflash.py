"""Blocks in training are the blocks of serving, see nothing that those do not see, and are learnt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_dflash
import torch
from eager import EagerLoop, Row
from lessons import KEPT, RECIPE, new_lesson
from torch import Tensor

from graphspec.architectures.drafters.dflash import DFlashDrafter
from graphspec.architectures.step import FusedStep
from graphspec.architectures.target import DecoderTarget
from graphspec.building import resolve_pair
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.anchors import choose_anchors
from graphspec.distill.batch import Batch, Hits, collate
from graphspec.distill.conversations import Conversation
from graphspec.distill.drafts import taps
from graphspec.distill.features import target_pass
from graphspec.distill.methods.dflash.blocks import run_blocks
from graphspec.distill.methods.dflash.drafts import draft_config
from graphspec.distill.methods.dflash.loss import loss
from graphspec.distill.recipe import DraftShape
from graphspec.distill.training import Lesson, train
from graphspec.errors import ConfigError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig

K, CAPACITY = 3, 64
PROMPTS = ((5, 93, 17, 64, 17, 101, 2), (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> FusedStep:
    root = tmp_path_factory.mktemp("blocks")
    tensors = tiny_dflash.dflash_tensors(num_taps=3, pruned=True)
    draft = tiny_dflash.save_dflash_speculators(root / "draft", tensors, taps=(2, 4, 5))
    pair = resolve_pair(tiny.save_llama(root / "target"), draft)
    target = pair.architecture.target.load(pair.target, capacity=CAPACITY)
    config = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=K)
    return FusedStep(target, pair.load_drafter(target, config))


def drafter_of(step: FusedStep) -> DFlashDrafter:
    assert isinstance(step.drafter, DFlashDrafter)
    return step.drafter


def features(step: FusedStep, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tokens i64[1, N] and taps of a text."""
    asked = Conversation(index=0, seed=0, temperature=0.0, category="", prompt=text[:1], answer=text[1:])
    (found,) = target_pass(step.target, [asked], drafter_of(step).taps)
    return found.tokens.unsqueeze(0), found.taps.float().unsqueeze(0)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_block_is_the_one_that_serving_drafts_there(step: FusedStep, prompt: tuple[int, ...]) -> None:
    loop = EagerLoop(step, [Row(prompt=prompt, chunk=3)], capacity=CAPACITY)
    (turn,) = loop.prefill()[-1]
    # The text goes on with the token that the target says, and is there to be seen by mistake after it.
    tokens, read = features(step, (*prompt, turn.next_tokens[0], *range(40, 52)))
    starts = torch.tensor([[1, len(prompt), len(prompt) + 5]])
    drafter = drafter_of(step)
    with torch.no_grad():
        out = run_blocks(drafter, step.target, tokens, read, starts)
        logits = drafter.logits(step.target, drafter.norm(out[:, 1, 1:]))[0]
    assert turn.draft_logits is not None
    torch.testing.assert_close(logits, turn.draft_logits, rtol=1e-2, atol=1e-2)  # features are kept in float16
    ids = logits.argmax(-1)
    assert (ids + drafter.offsets[ids]).tolist() == list(turn.next_tokens[1:])


def test_a_block_sees_nothing_from_its_start_on_but_its_own_token(step: FusedStep) -> None:
    tokens, read = features(step, tuple(range(3, 23)))
    starts, start = torch.tensor([[4, 9, 15]]), 9
    other_tokens, other_read = tokens.clone(), read.clone()
    other_tokens[:, :start] = 1
    other_tokens[:, start + 1 :] = 2
    other_read[:, start:] = 7.0
    drafter = drafter_of(step)
    with torch.no_grad():
        before = run_blocks(drafter, step.target, tokens, read, starts)
        after = run_blocks(drafter, step.target, other_tokens, other_read, starts)
        other_read[:, start - 1] += 1.0
        changed = run_blocks(drafter, step.target, other_tokens, other_read, starts)
    assert torch.equal(before[:, 1], after[:, 1])
    assert not torch.equal(before[:, 2], after[:, 2])
    assert not torch.equal(after[:, 1], changed[:, 1])


def batch_of(lesson: Lesson, count: int) -> Batch:
    chosen = lesson.training[:count]
    return collate(chosen, [lesson.store.load(conversation) for conversation in chosen])


@pytest.fixture
def lesson(chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path) -> Lesson:
    return new_lesson("dflash", chatty, target, conversations, tmp_path)


def test_blocks_stand_where_serving_drafts_a_token_of_the_answer(lesson: Lesson) -> None:
    batch, generator = batch_of(lesson, 3), torch.Generator().manual_seed(0)
    few, again, all_of_them = (choose_anchors(batch, most, generator) for most in (4, 4, 100))
    assert few.taught.sum(1).tolist() == [4, 4, 4]
    assert not torch.equal(few.positions, again.positions)
    for row, conversation in enumerate(lesson.training[:3]):
        possible = range(len(conversation.prompt) - 1, len(conversation.tokens) - 2)
        assert all_of_them.positions[row][all_of_them.taught[row]].tolist() == list(possible)
        assert set(few.positions[row].tolist()) <= set(possible)


def test_held_out_drafts_are_counted_at_every_position(lesson: Lesson) -> None:
    hits, generator = Hits(), torch.Generator()
    with torch.no_grad():
        loss(lesson.drafter, lesson.target, batch_of(lesson, 1), replace(RECIPE, anchors=2), generator, hits=hits)
    count = len(lesson.training[0].answer) - 1  # the target itself says the first one
    assert hits.chains == [count, count - 1, count - 2]


def test_the_loss_is_the_cross_entropy_with_the_targets_distribution(lesson: Lesson) -> None:
    """Position by position, from the definition; padding beside it changes nothing."""
    drafter, (only, _) = lesson.drafter, lesson.training[2:4]
    kept, read = drafter.says, lesson.store.load(only)
    with torch.no_grad():
        found = float(loss(drafter, lesson.target, collate([only], [read]), RECIPE, torch.Generator()))
        means = []
        for draft in range(RECIPE.depth):
            losses = []
            for start in range(len(only.prompt), len(only.tokens) - 1 - draft):
                token = start + 1 + draft
                if only.tokens[token] in kept.tolist():
                    taps_before = read.taps[None, :start].float()
                    tokens = read.tokens[None, : start + 1]
                    # A text that ends with the block's own token.
                    padded = torch.nn.functional.pad(taps_before, (0, 0, 0, 1))
                    out = run_blocks(drafter, lesson.target, tokens, padded, torch.tensor([[start]]))
                    said = drafter.logits(lesson.target, drafter.norm(out[:, 0, 1 + draft]))[0]
                    wanted = lesson.target.logits(read.final[None, None, token - 1].float())[0, 0, kept]
                    losses.append(-(wanted.softmax(-1) * said.log_softmax(-1)).sum())
            means.append(float(torch.stack(losses).mean()))
    weights = [RECIPE.decay**draft for draft in range(RECIPE.depth)]
    expected = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_draft_begins_as_a_copy_of_the_targets_end(lesson: Lesson) -> None:
    layers = list(lesson.target.layers)[-2:]
    for own, model in zip(lesson.drafter.layers, layers, strict=True):
        assert torch.equal(own.attention.qkv.weight, model.attention.qkv.weight)
        assert torch.equal(own.mlp.down.weight, model.mlp.down.weight)


def test_a_saved_draft_is_the_one_that_was_trained(lesson: Lesson, chatty: Path, tmp_path: Path) -> None:
    train(lesson, replace(RECIPE, epochs=1), tmp_path / "training", identity="a")
    config = draft_config(open_checkpoint(chatty).config, DraftShape(), KEPT, RECIPE.depth)
    lesson.method.save(tmp_path / "draft", lesson.drafter, config)
    pair = resolve_pair(chatty, tmp_path / "draft", method="dflash")
    assert pair.architecture.name == "UnifiedDflashLlama3ForCausalLM"
    settings = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=3)
    loaded = pair.load_drafter(lesson.target, settings)
    assert (loaded.taps, loaded.mask_token) == (lesson.drafter.taps, lesson.drafter.mask_token)
    assert torch.equal(loaded.offsets, lesson.drafter.offsets)
    for name, parameter in lesson.drafter.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter.detach().half().float(), rtol=0, atol=0)


def test_what_a_target_has_not_is_refused(chatty: Path) -> None:
    config = open_checkpoint(chatty).config
    with pytest.raises(ConfigError, match="--draft-layers 5: the target itself has 4"):
        draft_config(config, DraftShape(layers=5), KEPT, 3)
    with pytest.raises(UnsupportedError, match="DFlash reads three layers, and a target of 3"):
        draft_config({**config, "num_hidden_layers": 3}, DraftShape(), KEPT, 3)
    assert draft_config(config, DraftShape(), KEPT, 3)["aux_hidden_state_layer_ids"] == list(taps(4, reader="DFlash"))
