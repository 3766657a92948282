"""Tiny Medusa heads as FasterDecoding publishes them, and what they say from the formula."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from reference import TargetStates
from safetensors.torch import save_file
from tiny import HIDDEN, VOCABULARY, _random
from torch import Tensor

FILE = "medusa_lm_head.safetensors"


def medusa_tensors(
    seed: int = 4,
    *,
    heads: int = 3,
    blocks: int = 1,
    bias: bool = True,
    own_output: bool = True,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Heads of several residual blocks, and a projection of their own or none."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = _random(generator, HIDDEN, HIDDEN, std=0.2)
            if bias:
                tensors[f"{prefix}{head}.{block}.linear.bias"] = _random(generator, HIDDEN, std=0.2)
        if own_output:
            tensors[f"{prefix}{head}.{blocks}.weight"] = _random(generator, VOCABULARY, HIDDEN)
    return tensors


def save_medusa(path: Path, tensors: Mapping[str, Tensor] | None = None, *, file: str = FILE, **changes: Any) -> Path:
    """config.json, which says two heads as published ones do, and the weights in `file`: .safetensors or .pt."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny", **changes}
    (path / "config.json").write_text(json.dumps(config))
    stored = dict(medusa_tensors() if tensors is None else tensors)
    if file.endswith(".pt"):
        torch.save(stored, path / file)
    else:
        save_file(stored, path / file)
    return path


def medusa_logits(
    tokens: Sequence[int], states: TargetStates, *, tensors: Mapping[str, Tensor], head: Tensor, blocks: int, count: int
) -> Tensor:
    """f64[count, V]: what heads 0 … count-1 say after tokens x_0 … x_n, of which the target has run all but the last
    (§4.9). `head` is the target's, used where a head has no projection of its own."""
    final = states.final[len(tokens) - 2]
    logits = []
    for number in range(count):
        own = {name.partition(".")[2]: t.double() for name, t in tensors.items() if name.startswith(f"{number}.")}
        x = final
        for block in range(blocks):
            read = own[f"{block}.linear.weight"] @ x + own.get(f"{block}.linear.bias", torch.tensor(0.0))
            x = x + read / (1 + torch.exp(-read))
        logits.append(own.get(f"{blocks}.weight", head) @ x)
    return torch.stack(logits)
