"""EAGLE-1/2 heads propose what the formulas say of the whole committed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch
from reference import HeadShape, TargetStates
from torch import Tensor
from twins import Drafts, Expected, K, Twin, check_drafts, chosen, load_step

PROMPT = (5, 93, 17, 64, 17, 101, 2)
PROMPTS = (PROMPT, (77,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 99))


def _tensors(**options: Any) -> dict[str, Tensor]:
    return tiny.unsaturated(tiny.eagle_tensors(**options))


def _normed(*names: str) -> dict[str, Tensor]:
    tensors = _tensors()
    return tensors | {name: torch.linspace(0.5, 1.5 + i, tiny.HIDDEN) for i, name in enumerate(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A variant found in published checkpoints."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=_tensors)
    config: dict[str, Any] = field(default_factory=dict)
    shape: HeadShape = field(default_factory=HeadShape)

    def save(self, path: Path) -> Path:
        return tiny.save_eagle(path, self.tensors, **self.config)

    def drafts_of(self, twin: Twin) -> Expected:
        """What it should propose."""

        def drafts(known: Sequence[int], states: TargetStates) -> Drafts:
            logits = reference.eagle_logits(
                known,
                states,
                tensors=self.tensors,
                embedding=twin.embedding,
                head=twin.head,
                count=K,
                shape=self.shape,
            )
            return chosen(logits)

        return drafts


PLAIN = Head(name="Llama 3")
HEADS = (
    PLAIN,
    Head(name="fc bias", tensors=_tensors(fc_bias=True), config={"bias": True}),
    Head(name="qkv bias", tensors=_tensors(qkv_bias=True), config={"qkv_bias": True}),
    Head(name="two layers", tensors=_tensors(layers=2), config={"num_hidden_layers": 2}, shape=HeadShape(layers=2)),
    Head(name="norm before the first attention", tensors=_normed("layers.0.input_layernorm.weight")),
    Head(name="norm at the end", tensors=_normed("norm.weight"), config={"use_last_layernorm": True}),
    Head(name="own rope theta", config={"rope_theta": 500.0}, shape=HeadShape(theta=500.0)),
    Head(
        name="own rope scaling",
        config={"rope_scaling": {"type": "linear", "factor": 4.0}},
        shape=HeadShape(position_scale=0.25),
    ),
)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_rows_that_accept_differently_are_drafted_for_as_if_alone(small: Twin, tmp_path: Path, head: Head) -> None:
    step = load_step(small, head.save(tmp_path), "eagle")
    check_drafts(step, small, PROMPTS, (3, 1, 4), head.drafts_of(small), own_drafts=2)


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_a_prompt_is_drafted_for_alike_however_it_is_chunked(small: Twin, tmp_path: Path, chunk: int) -> None:
    step = load_step(small, PLAIN.save(tmp_path), "eagle")
    check_drafts(step, small, (PROMPT,), (chunk,), PLAIN.drafts_of(small))


def test_a_qwen3_target_can_have_a_llama_shaped_head(qwen3: Twin, tmp_path: Path) -> None:
    step = load_step(qwen3, PLAIN.save(tmp_path), "eagle")
    check_drafts(step, qwen3, PROMPTS, (3, 1, 4), PLAIN.drafts_of(qwen3))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_copies_of_the_target_in_a_head_are_ignored(small: Twin, tmp_path: Path, prefix: str) -> None:
    copies = {name: torch.full((3,), 9.0) for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight")}
    stored = {f"{prefix}{name}": value for name, value in (PLAIN.tensors | copies).items()}
    step = load_step(small, tiny.save_eagle(tmp_path, stored), "eagle")
    check_drafts(step, small, (PROMPT,), (4,), PLAIN.drafts_of(small))


def test_a_config_nested_in_model_is_read(small: Twin, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    nested = {**sizes, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 16}
    config = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle", "model": nested}
    step = load_step(small, tiny.save_draft(tmp_path, config, PLAIN.tensors), "eagle")
    check_drafts(step, small, (PROMPT,), (4,), PLAIN.drafts_of(small))
