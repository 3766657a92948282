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
def greedy_answers(checkpoint: Path, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """transformers' greedy continuation of each of PROMPTS, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        answers.append(tuple(generated[0, len(prompt) :].tolist()))
    return tuple(answers)
