"""DFlash drafts, in both layouts, propose what transformers' module of the same weights does of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_dflash
import torch
from reference import TargetStates
from torch import Tensor
from twins import Drafts, Expected, K, Twin, check_drafts, chosen, load_step

PROMPT = (5, 93, 17, 64, 17, 101, 2)
PROMPTS = (PROMPT, (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))
TENSORS = tiny_dflash.dflash_tensors()


def drafts_of(
    twin: Twin, tensors: dict[str, Tensor], *, taps: Sequence[int] = (2, 6), layers: int = 2, theta: float = 10000.0
) -> Expected:
    """What a draft of these tensors should propose."""
    module = tiny_dflash.reference_module(tensors, num_taps=len(taps), layers=layers, theta=theta)
    embedding = tensors.get("embed_tokens.weight", twin.embedding).double()
    head = tensors.get("lm_head.weight", twin.head).double()

    def drafts(known: Sequence[int], states: TargetStates) -> Drafts:
        logits = tiny_dflash.reference_logits(module, known, states, taps=taps, embedding=embedding, head=head, count=K)
        return chosen(logits, tensors.get("d2t"))

    return drafts


def test_rows_that_accept_differently_are_drafted_for_as_if_alone(llama: Twin, tmp_path: Path) -> None:
    step = load_step(llama, tiny_dflash.save_dflash(tmp_path), "dflash")
    check_drafts(step, llama, PROMPTS, (3, 1, 4), drafts_of(llama, TENSORS), own_drafts=2)


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_a_prompt_is_drafted_for_alike_however_it_is_chunked(llama: Twin, tmp_path: Path, chunk: int) -> None:
    step = load_step(llama, tiny_dflash.save_dflash(tmp_path), "dflash")
    check_drafts(step, llama, (PROMPT,), (chunk,), drafts_of(llama, TENSORS))


def test_a_qwen3_target_has_them_too(qwen3: Twin, tmp_path: Path) -> None:
    step = load_step(qwen3, tiny_dflash.save_dflash(tmp_path), "dflash")
    check_drafts(step, qwen3, PROMPTS[:2], (3, 1), drafts_of(qwen3, TENSORS))


def test_the_speculators_layout_has_a_head_of_its_own(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny_dflash.dflash_tensors(num_taps=3, pruned=True)
    step = load_step(llama, tiny_dflash.save_dflash_speculators(tmp_path, tensors, taps=(1, 3, 8)), "dflash")
    check_drafts(step, llama, PROMPTS[:2], (3, 1), drafts_of(llama, tensors, taps=(1, 3, 8)), own_drafts=1)


def test_an_own_embedding_and_rope_are_used(llama: Twin, tmp_path: Path) -> None:
    own = torch.randn(tiny.VOCABULARY, tiny.HIDDEN, generator=torch.Generator().manual_seed(9)) * 0.2
    tensors = TENSORS | {"embed_tokens.weight": own}
    step = load_step(llama, tiny_dflash.save_dflash(tmp_path, tensors, rope_theta=500.0), "dflash")
    check_drafts(step, llama, (PROMPT,), (4,), drafts_of(llama, tensors, theta=500.0))


@pytest.mark.parametrize(
    ("layers", "ids", "taps"),
    [
        (1, None, (5,)),  # z-lab's rule: the middle of 8
        (3, None, (2, 4, 6)),
        (2, [0, 3, 7], (1, 4, 8)),  # as many as the draft says, whatever its depth
    ],
)
def test_the_layers_that_are_read(
    llama: Twin, tmp_path: Path, layers: int, ids: list[int] | None, taps: tuple[int, ...]
) -> None:
    tensors = tiny_dflash.dflash_tensors(num_taps=len(taps), layers=layers)
    block: dict[str, Any] = {"mask_token_id": tiny_dflash.MASK} | ({} if ids is None else {"target_layer_ids": ids})
    path = tiny_dflash.save_dflash(tmp_path, tensors, num_hidden_layers=layers, dflash_config=block)
    step = load_step(llama, path, "dflash")
    assert step.drafter.taps == taps
    check_drafts(step, llama, (PROMPT,), (4,), drafts_of(llama, tensors, taps=taps, layers=layers))


def test_keys_at_the_top_of_the_config_are_read_as_well(llama: Twin, tmp_path: Path) -> None:
    path = tiny_dflash.save_dflash(
        tmp_path, dflash_config=None, mask_token_id=tiny_dflash.MASK, target_layer_ids=[1, 5]
    )
    check_drafts(load_step(llama, path, "dflash"), llama, (PROMPT,), (4,), drafts_of(llama, TENSORS))
