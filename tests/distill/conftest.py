"""A tiny target whose chat it can make up itself, and its bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from graphspec.architectures.target import DecoderTarget
    from graphspec.distill.conversations import Conversation

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's checkpoint: a message of it ends at one token in eight."""
    import tiny

    path = tiny.save_llama(tmp_path_factory.mktemp("chatty") / "target", layers=4)
    (path / "chat_template.jinja").write_text(CHAT)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(0, 128, 8))}))
    return path


@pytest.fixture(scope="session")
def chatty_bundle(chatty: Path) -> Path:
    """Its bundle in float32."""
    from graphspec.building import build

    out = chatty.parent / "bundle"
    build(model=chatty, out=out, encoding="float32", num_speculative_tokens=1, max_length=200, max_batch_size=4)
    return out


@pytest.fixture(scope="session")
def target(chatty: Path) -> DecoderTarget:
    """It, loaded."""
    import torch
    from lessons import CAPACITY

    from graphspec.building import resolve_pair

    torch.set_num_threads(1)
    pair = resolve_pair(chatty)
    loaded: DecoderTarget = pair.architecture.target.load(pair.target, capacity=CAPACITY)
    return loaded


@pytest.fixture(scope="session")
def conversations(target: DecoderTarget) -> list[Conversation]:
    """What it says."""
    from lessons import answered_prompts

    return answered_prompts(target)
