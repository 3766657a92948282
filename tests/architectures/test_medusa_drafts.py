"""Medusa heads propose what the formula says of the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import tiny_medusa
import torch
from reference import TargetStates
from torch import Tensor
from twins import Drafts, Expected, K, Twin, check_drafts, chosen, load_step, load_twin

from graphspec.architectures.drafters.medusa import MedusaDrafter
from graphspec.export.rotation import rotate

PROMPT = (5, 93, 17, 64, 17, 101, 2)
PROMPTS = (PROMPT, (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))
TENSORS = tiny_medusa.medusa_tensors()


def drafts_of(twin: Twin, tensors: dict[str, Tensor] = TENSORS, *, blocks: int = 1, count: int = K) -> Expected:
    """What heads of these tensors should propose."""

    def drafts(known: Sequence[int], states: TargetStates) -> Drafts:
        return chosen(
            tiny_medusa.medusa_logits(known, states, tensors=tensors, head=twin.head, blocks=blocks, count=count)
        )

    return drafts


def test_rows_that_accept_differently_are_drafted_for_as_if_alone(llama: Twin, tmp_path: Path) -> None:
    step = load_step(llama, tiny_medusa.save_medusa(tmp_path), "medusa")
    check_drafts(step, llama, PROMPTS, (3, 1, 4), drafts_of(llama), own_drafts=2)


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_a_prompt_is_drafted_for_alike_however_it_is_chunked(small: Twin, tmp_path: Path, chunk: int) -> None:
    step = load_step(small, tiny_medusa.save_medusa(tmp_path), "medusa")
    check_drafts(step, small, (PROMPT,), (chunk,), drafts_of(small))


def test_a_qwen3_target_has_them_too(qwen3: Twin, tmp_path: Path) -> None:
    step = load_step(qwen3, tiny_medusa.save_medusa(tmp_path), "medusa")
    check_drafts(step, qwen3, PROMPTS[:2], (3, 1), drafts_of(qwen3))


def test_the_first_head_drafts_the_token_behind_the_pending_one(small: Twin, tmp_path: Path) -> None:
    """Heads that do nothing to what they read say what the target says next: the pending token."""
    tensors = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
    tensors |= {f"{head}.1.weight": small.head.float() for head in range(K)}
    step = load_step(small, tiny_medusa.save_medusa(tmp_path, tensors), "medusa")
    check_drafts(
        step,
        small,
        (PROMPT,),
        (len(PROMPT),),
        lambda known, _: Drafts(tokens=[small.whole(PROMPT)[len(known) - 1]] * K),
    )


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_layouts_are_read(small: Twin, tmp_path: Path, file: str, prefix: str) -> None:
    stored = {f"{prefix}{name}": value for name, value in TENSORS.items()}
    step = load_step(small, tiny_medusa.save_medusa(tmp_path, stored, file=file), "medusa")
    check_drafts(step, small, (PROMPT,), (4,), drafts_of(small))


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize(("blocks", "bias"), [(1, False), (3, True)])
def test_heads_of_other_parts(small: Twin, tmp_path: Path, blocks: int, bias: bool, own_output: bool) -> None:
    tensors = tiny_medusa.medusa_tensors(blocks=blocks, bias=bias, own_output=own_output)
    step = load_step(small, tiny_medusa.save_medusa(tmp_path, tensors), "medusa")
    check_drafts(step, small, PROMPTS[:2], (3, 1), drafts_of(small, tensors, blocks=blocks), own_drafts=1)


def test_a_block_that_is_stored_once_is_every_block_of_its_head(small: Twin, tmp_path: Path) -> None:
    """The reference's two blocks are one module, and a safetensors file holds its tensors once."""
    once = tiny_medusa.medusa_tensors(own_output=False)
    outputs = {f"{head}.2.weight": TENSORS[f"{head}.1.weight"] for head in range(K)}
    twice = {name.replace(".0.linear", ".1.linear"): value for name, value in once.items()}
    path = tiny_medusa.save_medusa(tmp_path, once | outputs, medusa_num_layers=2)
    expected = drafts_of(small, once | twice | outputs, blocks=2)
    check_drafts(load_step(small, path, "medusa"), small, (PROMPT,), (4,), expected)


def test_fewer_tokens_than_heads_are_those_of_the_first(small: Twin, tmp_path: Path) -> None:
    tensors = tiny_medusa.medusa_tensors(heads=5)
    step = load_step(small, tiny_medusa.save_medusa(tmp_path, tensors), "medusa")
    assert isinstance(step.drafter, MedusaDrafter)
    assert len(step.drafter.heads) == K
    check_drafts(step, small, (PROMPT,), (4,), drafts_of(small, tensors))


@pytest.mark.parametrize("own_output", [True, False])
def test_they_read_a_turned_target_as_it_was(tmp_path: Path, own_output: bool) -> None:
    twin = load_twin(tiny.save_llama(tmp_path / "target", layers=2))
    tensors = tiny_medusa.medusa_tensors(own_output=own_output)
    step = load_step(twin, tiny_medusa.save_medusa(tmp_path / "heads", tensors), "medusa")
    rotate(step.target)
    check_drafts(step, twin, PROMPTS[:2], (3, 1), drafts_of(twin, tensors))
