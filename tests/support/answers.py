"""Answers computed without any of our code: transformers runs the checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPTS = tuple(tuple((5 * i * i + 3 * n) % 128 for i in range(n)) for n in (1, 2, 3, 5, 8, 13, 21, 34))
"""Eight prompts of a tiny model's tokens, the shortest of one."""


@cache
def _model(checkpoint: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


@cache
def greedy_answer(checkpoint: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """transformers' greedy continuation, in float32."""
    ids = torch.tensor([prompt])
    generated = _model(checkpoint).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return tuple(generated[0, len(prompt) :].tolist())
