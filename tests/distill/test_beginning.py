"""A draft whose training goes on is the draft that it was; what would make it another one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lessons import RECIPE, config_of, new_lesson

from graphspec.architectures.target import DecoderTarget
from graphspec.building import resolve_pair
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.beginning import check_depth, go_on
from graphspec.distill.conversations import Conversation
from graphspec.distill.methods import METHODS
from graphspec.distill.recipe import DraftShape
from graphspec.errors import ConfigError, UnsupportedError


@pytest.fixture(params=METHODS)
def draft(
    request: pytest.FixtureRequest,
    chatty: Path,
    target: DecoderTarget,
    conversations: list[Conversation],
    tmp_path: Path,
) -> Path:
    """Of each method, under its name."""
    lesson = new_lesson(request.param, chatty, target, conversations[:1], tmp_path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lesson.drafter.parameters():
            parameter.copy_((parameter + torch.randn(parameter.shape, generator=generator) * 0.1).half())
    lesson.method.save(tmp_path / request.param, lesson.drafter, config_of(request.param, chatty))
    return tmp_path / str(request.param)


def test_a_draft_that_goes_on_is_what_it_was(draft: Path, chatty: Path, target: DecoderTarget, tmp_path: Path) -> None:
    method = METHODS[draft.name]
    pair = resolve_pair(chatty, draft, method=method.name)
    begun = go_on(method, pair, target, depth=RECIPE.depth)
    assert begun.config == config_of(method.name, chatty)
    method.save(tmp_path / "again", begun.drafter, begun.config)
    (weights,) = (tmp_path / "again").glob("*.safetensors")
    assert weights.read_bytes() == (draft / weights.name).read_bytes()
    assert all(parameter.requires_grad for parameter in begun.drafter.parameters())


def test_another_rope_than_the_targets_is_not_lost(draft: Path, chatty: Path, target: DecoderTarget) -> None:
    """It would be trained with, and the target's written to config.json."""
    path = draft / "config.json"
    config = json.loads(path.read_text())
    if draft.name == "medusa":
        assert "rope_theta" not in config
        return
    config.get("transformer_layer_config", config)["rope_theta"] = 500.0
    path.write_text(json.dumps(config))
    pair = resolve_pair(chatty, draft, method=draft.name)
    with pytest.raises(UnsupportedError, match=r"cannot be trained on: rotary\.cos, rotary\.sin;"):
        go_on(METHODS[draft.name], pair, target, depth=RECIPE.depth)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_block_and_heads_keep_their_number(draft: Path, chatty: Path, more: int) -> None:
    pair = resolve_pair(chatty, draft, method=draft.name)
    check_depth(pair, RECIPE.depth)
    if draft.name in ("eagle", "eagle3"):  # they run on their own output
        check_depth(pair, RECIPE.depth + more)
        return
    with pytest.raises(ConfigError, match=f"--depth {RECIPE.depth + more}: .* proposes 3 tokens; give --depth 3"):
        check_depth(pair, RECIPE.depth + more)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"medusa"}))
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_draft_turns_as_its_target_in_either_spelling(chatty: Path, method: str, key: str) -> None:
    config = dict(open_checkpoint(chatty).config)
    scaled = {"rope_type": "linear", "factor": 4.0}
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        config.pop(name, None)
    config |= {key: {**scaled, "rope_theta": 5e5}} if key == "rope_parameters" else {key: scaled, "rope_theta": 5e5}
    made = METHODS[method].draft_config(config, DraftShape(), 128, 3)
    layers = made.get("transformer_layer_config", made)
    assert layers["rope_theta"] == 5e5
    assert "rope_scaling" not in layers  # the scaling is the target's alone
