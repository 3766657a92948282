"""A draft LM proposes what transformers says it would, from the whole committed sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
from eager import EagerLoop, Row
from house import HOUSE, NAME
from reference import TargetStates
from twins import CAPACITY, Drafts, Expected, K, Twin, check_drafts, chosen, load_step

from graphspec.architectures.step import FusedStep
from graphspec.building import resolve_pair
from graphspec.errors import ResolutionError
from graphspec.speculative_config import SpeculativeConfig

PROMPT = (5, 93, 17, 64, 17, 101, 2)
PROMPTS = (PROMPT, (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
DRAFTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "one layer": (tiny.save_llama, {"layers": 1}),
    "smaller, several layers": (tiny.save_llama, {"layers": 3, **SMALL}),
    "tied embeddings": (tiny.save_llama, {"layers": 2, "tie_word_embeddings": True}),
    "another rope": (
        tiny.save_llama,
        {"layers": 2, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "a Qwen3": (tiny.save_qwen3, {"layers": 2}),
}


def _drafts_of(path: Path) -> Expected:
    model = reference.load_model(path)

    def drafts(known: Sequence[int], _states: TargetStates) -> Drafts:
        return chosen(reference.model_logits(known, model, K))

    return drafts


@pytest.mark.parametrize("kind", DRAFTS)
def test_rows_that_accept_differently_are_drafted_for_as_if_alone(small: Twin, tmp_path: Path, kind: str) -> None:
    save, changes = DRAFTS[kind]
    draft = save(tmp_path, seed=5, **changes)
    step = load_step(small, draft, "standalone")
    check_drafts(step, small, PROMPTS, (3, 1, 4), _drafts_of(draft), own_drafts=2)


def test_a_draft_of_a_family_that_only_arch_module_knows_is_loaded_as_one(small: Twin, tmp_path: Path) -> None:
    draft = tiny.save_llama(tmp_path, seed=5, layers=2)
    config = json.loads((draft / "config.json").read_text()) | {"architectures": [NAME], "model_type": "house"}
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ResolutionError):
        resolve_pair(small.path, draft)
    pair = resolve_pair(small.path, draft, arch_modules=["house"])
    assert (pair.architecture.target.name, pair.draft_kind) == ("llama3", HOUSE)
    settings = SpeculativeConfig.parse({"speculative_method": "standalone", "num_speculative_tokens": 2})
    step = FusedStep(small.target, pair.load_drafter(small.target, settings))
    assert step.drafter.num_draft_tokens == 2
    assert len(step.states) == len(small.target.states) + 4  # keys and values of the draft's two layers


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_a_prompt_is_drafted_for_alike_however_it_is_chunked(small: Twin, tmp_path: Path, chunk: int) -> None:
    draft = tiny.save_llama(tmp_path, seed=5, layers=2)
    check_drafts(load_step(small, draft, "standalone"), small, (PROMPT,), (chunk,), _drafts_of(draft))


def test_a_qwen3_target_can_have_a_llama_draft(qwen3: Twin, tmp_path: Path) -> None:
    draft = tiny.save_llama(tmp_path, seed=5, layers=2)
    check_drafts(load_step(qwen3, draft, "standalone"), qwen3, PROMPTS, (3, 1, 4), _drafts_of(draft))


def test_a_target_that_drafts_for_itself_is_always_right(small: Twin) -> None:
    rows = [Row(prompt=PROMPT, chunk=3), Row(prompt=(77,), chunk=1)]
    loop = EagerLoop(load_step(small, small.path, "standalone"), rows, capacity=CAPACITY)
    loop.prefill()
    assert [turn.accepted for _ in range(4) for turn in loop.advance(K)] == [K] * 8
    assert all(tuple(row.tokens) == small.whole(row.prompt)[: len(row.tokens)] for row in rows)
