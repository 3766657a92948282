"""The Qwen3 architectures."""

from __future__ import annotations

from typing import Any

from graphspec.architecture import Facts, TargetKind
from graphspec.checkpoints import Checkpoint
from graphspec.detection import classify_target

from ..drafters.declarations import DFLASH, EAGLE, EAGLE3, MEDUSA, declare


def _matches(facts: Facts) -> bool:
    return classify_target(facts) == "qwen3"


def _load(checkpoint: Checkpoint, *, capacity: int) -> Any:
    from .target import load_target

    return load_target(checkpoint, capacity=capacity)


TARGET = TargetKind(name="qwen3", label="Qwen3", matches=_matches, load=_load)
ARCHITECTURES = declare(TARGET, EAGLE, EAGLE3, DFLASH, MEDUSA)
