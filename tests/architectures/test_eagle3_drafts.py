"""EAGLE-3 heads, in every spelling, propose what the formulas say of the whole committed sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch
from reference import Eagle3Rules, HeadShape, TargetStates
from torch import Tensor
from twins import Drafts, Expected, K, Twin, check_drafts, chosen, load_step

PROMPT = (5, 93, 17, 64, 17, 101, 2)
PROMPTS = (PROMPT, (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))


def _tensors(**options: Any) -> dict[str, Tensor]:
    return tiny.unsaturated(tiny.eagle3_tensors(**options))


def _with(added: dict[str, int], **options: Any) -> dict[str, Tensor]:
    """The head with further norms of these widths."""
    return _tensors(**options) | {
        name: torch.linspace(0.5, 1.5 + i, width) for i, (name, width) in enumerate(added.items())
    }


def _without(*names: str, **options: Any) -> dict[str, Tensor]:
    return {name: value for name, value in _tensors(**options).items() if name not in names}


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A variant found in published checkpoints."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=_tensors)
    config: dict[str, Any] = field(default_factory=dict)
    shape: HeadShape = field(default_factory=HeadShape)
    rules: Eagle3Rules = field(default_factory=Eagle3Rules)
    save_as: Callable[..., Path] = tiny.save_eagle3

    def save(self, path: Path) -> Path:
        return self.save_as(path, self.tensors, **self.config)

    def drafts_of(self, twin: Twin) -> Expected:
        """What it should propose."""

        def drafts(known: Sequence[int], states: TargetStates) -> Drafts:
            logits = reference.eagle3_logits(
                known,
                states,
                tensors=self.tensors,
                embedding=twin.embedding,
                head=twin.head,
                count=K,
                shape=self.shape,
                rules=self.rules,
            )
            return chosen(logits, self.tensors.get("d2t"))

        return drafts


def _taps(name: str, *taps: int, **config: Any) -> Head:
    """A head whose config says where it taps; `taps` are the layers that the tapped states enter."""
    return Head(name=name, tensors=_tensors(num_taps=len(taps)), rules=Eagle3Rules(taps=taps), config=config)


IDS = "eagle_aux_hidden_state_layer_ids"
FULL: dict[str, Any] = {"draft_vocab_size": tiny.VOCABULARY}
PLAIN = Head(name="three taps, pruned")
FC_NORMS = {f"fc_norm.{i}.weight": tiny.HIDDEN for i in range(3)}
SMALL = {"embed_tokens.weight": _random(8, tiny.VOCABULARY, 32)}
HEADS = (
    PLAIN,
    Head(name="full vocabulary", tensors=_tensors(pruned=False), config=FULL),
    Head(name="the target's head", tensors=_without("lm_head.weight", pruned=False), config=FULL),
    Head(name="own embedding", tensors=_tensors() | {"embed_tokens.weight": _random(9, tiny.VOCABULARY, tiny.HIDDEN)}),
    Head(
        name="another hidden size",
        tensors=_tensors(hidden=32, pruned=False) | SMALL,
        config={"hidden_size": 32, **FULL},
    ),
    Head(
        name="norm before residual",
        config={"norm_before_residual": True},
        rules=Eagle3Rules(norm_before_residual=True),
    ),
    Head(name="norm of each tap", tensors=_with(FC_NORMS)),
    Head(
        name="EAGLE-3.1",
        tensors=_with(FC_NORMS),
        config={"fc_norm": True, "norm_output": True},
        rules=Eagle3Rules(norm_output=True),
    ),
    Head(
        name="norm before fc",
        tensors=_with({"input_norm.weight": 3 * tiny.HIDDEN}),
        config={"norm_before_fc": True},
    ),
    Head(name="fc bias", tensors=_tensors() | {"fc.bias": _random(10, tiny.HIDDEN)}),
    Head(name="norms of q and k", tensors=_tensors(qk_norm=True)),
    Head(name="biases of q, k and v", tensors=_tensors(qkv_bias=True)),
    Head(name="two layers", tensors=_tensors(layers=2), config={"num_hidden_layers": 2}, shape=HeadShape(layers=2)),
    Head(
        name="own rope",
        config={"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        shape=HeadShape(theta=500.0, position_scale=0.25),
    ),
    Head(
        name="speculators",
        tensors=_tensors(prefix="layers.0"),
        config={"taps": (1, 3, 8)},
        rules=Eagle3Rules(taps=(1, 3, 8), prefix="layers.0.", norm_before_residual=True),
        save_as=tiny.save_eagle3_speculators,
    ),
)
SPELLINGS = (
    _taps("vLLM names the layers entered", 0, 3, 7, **{IDS: [0, 3, 7]}),
    _taps("SGLang names the layers left", 1, 4, 8, eagle_config={IDS: [0, 3, 7]}),
    _taps("SpecForge's default at the top level", 2, 4, 5, **{IDS: [1, 3, 4]}),
    _taps("the reference's default in eagle_config", 2, 4, 5, eagle_config={IDS: [2, 4, 5]}),
    _taps("two taps", 3, 6, **{IDS: [3, 6]}),
    _taps("five taps", 1, 2, 4, 6, 8, eagle_config={IDS: [0, 1, 3, 5, 7]}),
)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_rows_that_accept_differently_are_drafted_for_as_if_alone(llama: Twin, tmp_path: Path, head: Head) -> None:
    step = load_step(llama, head.save(tmp_path), "eagle3")
    check_drafts(step, llama, PROMPTS[:2], (3, 1), head.drafts_of(llama), own_drafts=1)


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_a_prompt_is_drafted_for_alike_however_it_is_chunked(llama: Twin, tmp_path: Path, chunk: int) -> None:
    step = load_step(llama, PLAIN.save(tmp_path), "eagle3")
    check_drafts(step, llama, (PROMPT,), (chunk,), PLAIN.drafts_of(llama))


@pytest.mark.parametrize("head", SPELLINGS, ids=lambda head: head.name)
def test_taps_are_read_in_every_spelling(llama: Twin, tmp_path: Path, head: Head) -> None:
    step = load_step(llama, head.save(tmp_path), "eagle3")
    assert step.drafter.taps == head.rules.taps
    check_drafts(step, llama, (PROMPT,), (4,), head.drafts_of(llama))


def test_a_qwen3_target_can_have_a_llama_shaped_head(qwen3: Twin, tmp_path: Path) -> None:
    step = load_step(qwen3, PLAIN.save(tmp_path), "eagle3")
    check_drafts(step, qwen3, PROMPTS, (3, 1, 4), PLAIN.drafts_of(qwen3))


@pytest.mark.parametrize("prefix", ["layers.0", "model.layers.0", "model.midlayer"])
def test_the_first_layer_has_several_names(llama: Twin, tmp_path: Path, prefix: str) -> None:
    stored = {
        f"{prefix}{name.removeprefix('midlayer')}" if name.startswith("midlayer") else name: value
        for name, value in PLAIN.tensors.items()
    }
    step = load_step(llama, tiny.save_eagle3(tmp_path, stored), "eagle3")
    check_drafts(step, llama, (PROMPT,), (4,), PLAIN.drafts_of(llama))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_of_the_targets_embedding_is_shared_whatever_it_was_rounded_to(
    llama: Twin, tmp_path: Path, dtype: torch.dtype
) -> None:
    copy = llama.embedding.float().to(dtype)
    step = load_step(llama, tiny.save_eagle3(tmp_path, PLAIN.tensors | {"embed_tokens.weight": copy}), "eagle3")
    check_drafts(step, llama, (PROMPT,), (4,), PLAIN.drafts_of(llama))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_head_computes_in_float32(llama: Twin, tmp_path: Path, dtype: torch.dtype) -> None:
    rounded = {name: x.to(dtype) if x.is_floating_point() else x for name, x in PLAIN.tensors.items()}
    head = Head(name="rounded", tensors=rounded)
    step = load_step(llama, head.save(tmp_path), "eagle3")
    check_drafts(step, llama, (PROMPT,), (4,), head.drafts_of(llama))
