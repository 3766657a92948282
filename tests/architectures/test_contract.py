"""What holds for every declared architecture, those added later included: each needs a tiny pair in pairs.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import reference
import torch
from eager import EagerLoop, Row, initial_state
from twins import CAPACITY, K

from graphspec.architecture import Architecture, TargetKind
from graphspec.architectures.drafters.declarations import EAGLE, declare
from graphspec.registry import find, registered

if TYPE_CHECKING:
    from pairs import Pairs

NAMES = [architecture.name for architecture in registered()]
COUNT = 8
PROMPTS = ((4, 5, 6, 4, 5), (77,), tuple(range(9)))


@pytest.mark.parametrize("architecture", registered(), ids=lambda architecture: architecture.name)
def test_an_architecture_is_named_after_its_drafter_and_target(architecture: Architecture) -> None:
    drafter, target = architecture.drafter.label, architecture.target.label
    assert architecture.name == f"Unified{drafter}{target}ForCausalLM"
    assert drafter.isalnum()
    assert target.isalnum()


def test_the_names_the_first_issue_asks_for_are_there() -> None:
    wanted = {
        f"Unified{d}{t}ForCausalLM" for d in ("Eagle", "Eagle3", "Standalone", "Ngram") for t in ("Llama3", "Qwen3")
    }
    assert wanted <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_a_tiny_pair_that_resolves_to_it(pairs: Pairs, name: str) -> None:
    import pairs as made

    from graphspec.checkpoints import open_checkpoint
    from graphspec.resolution import resolve

    assert name in made.NAMES, f"add a tiny pair of {name} to tests/support/pairs.py"
    pair = pairs.pair(name)
    draft = None if pair.draft is None else open_checkpoint(pair.draft)
    method = find(name, registered()).methods[0]
    assert resolve(open_checkpoint(pair.target), draft, method, None, registered()).architecture.name == name


@pytest.mark.parametrize("name", NAMES)
def test_states_are_named_once_and_keep_their_shape_and_type(pairs: Pairs, name: str) -> None:
    step = pairs.step(name)
    names = [spec.name for spec in step.states]
    assert len(set(names)) == len(names)
    assert all(spec.shape[0] == "batch" and spec.shape.count("capacity") == 1 for spec in step.states)
    loop = EagerLoop(step, [Row(prompt=prompt, chunk=3) for prompt in PROMPTS], capacity=CAPACITY)
    loop.prefill()
    for spec, state in zip(step.states, loop.states, strict=True):
        fresh = initial_state(spec, len(PROMPTS), CAPACITY)
        assert (state.shape, state.dtype) == (fresh.shape, fresh.dtype)
        assert not state.is_floating_point() or bool(torch.isfinite(state).all())


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_the_number_of_steps_and_not_the_tokens(pairs: Pairs, name: str) -> None:
    step, model = pairs.step(name), reference.load_model(pairs.pair(name).target)
    vocabulary = step.target.config.vocabulary
    answers = [reference.greedy(model, prompt, COUNT) for prompt in PROMPTS]
    for width in range(K + 1):
        rows = [Row(prompt=prompt, chunk=4) for prompt in PROMPTS]
        loop = EagerLoop(step, rows, capacity=CAPACITY)
        loop.prefill()
        while any(len(row.tokens) < len(row.prompt) + COUNT for row in rows):
            for turn in loop.advance(width):
                assert len(turn.next_tokens) == K + 1
                assert all(-1 <= token < vocabulary for token in turn.next_tokens)
                assert all(token >= 0 for token in turn.committed[: turn.accepted + 1])
                assert set(turn.committed[turn.accepted + 1 :]) <= {-1}
        for row, answer in zip(rows, answers, strict=True):
            assert row.tokens[len(row.prompt) :][:COUNT] == answer


def test_a_target_gets_standalone_and_ngram_without_asking() -> None:
    target = TargetKind(name="other", label="Other", matches=lambda _: False, load=lambda *_, **__: None)
    names = [architecture.name for architecture in declare(target, EAGLE)]
    assert names == [
        "UnifiedEagleOtherForCausalLM",
        "UnifiedStandaloneOtherForCausalLM",
        "UnifiedNgramOtherForCausalLM",
    ]
