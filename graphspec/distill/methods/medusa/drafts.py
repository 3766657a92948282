"""New Medusa heads for a target, and their checkpoint in FasterDecoding's layout, which other servers read too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphspec.architectures.drafters.medusa import MedusaDrafter
from graphspec.architectures.drafters.medusa_loading import sources
from graphspec.architectures.target import DecoderTarget
from graphspec.distill.drafts import WEIGHTS_FILES, set_parameter, stored_tensors, write_draft

_FILE = WEIGHTS_FILES[1]
"""Where other servers look for heads."""
_BLOCKS = 1
"""Of each head; the reference makes one module of several (checkpoints.md §4.9)."""


def draft_config(target: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """config.json of `depth` heads: their sizes are those of the target."""
    base = target.get("_name_or_path")
    named = {} if base is None else {"base_model_name_or_path": base}
    return {"medusa_num_heads": depth, "medusa_num_layers": _BLOCKS, **named, "torch_dtype": "float16"}


def new_drafter(
    target: DecoderTarget,
    config: Mapping[str, Any],
    kept: Tensor,  # noqa: ARG001 - heads say every token
    *,
    seed: int,  # noqa: ARG001 - nothing is drawn
) -> MedusaDrafter:
    """Heads that begin as the target's own: their projections are copies of its head, their blocks change nothing."""
    drafter = MedusaDrafter(
        target.config.hidden,
        num_draft_tokens=config["medusa_num_heads"],
        blocks=config["medusa_num_layers"],
        bias=True,
        vocabulary=target.config.vocabulary,
    )
    for name, parameter in list(drafter.named_parameters()):
        is_projection = name.endswith("output.weight")
        set_parameter(drafter, name, target.head_weight.clone() if is_projection else torch.zeros(parameter.shape))
    return drafter


def save_draft(folder: Path, drafter: MedusaDrafter, config: Mapping[str, Any]) -> None:
    """config.json and medusa_lm_head.safetensors in float16."""
    write_draft(folder, stored_tensors(drafter, sources(drafter)), config, file=_FILE)
