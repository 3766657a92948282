"""A target family of a model team's own, for --arch-module house: Llama layers under a name nobody else knows."""

from __future__ import annotations

from typing import Any

from graphspec.architecture import Architecture, TargetKind
from graphspec.architectures.drafters.declarations import STANDALONE
from graphspec.detection import architecture_name

NAME = "HouseForCausalLM"


def _load(checkpoint: Any, *, capacity: int) -> Any:
    from graphspec.architectures.llama3.target import load_target

    return load_target(checkpoint, capacity=capacity)


HOUSE = TargetKind(
    name="house",
    label="House",
    matches=lambda facts: architecture_name(facts.config) == NAME,
    load=_load,
)
ARCHITECTURES = (Architecture(target=HOUSE, drafter=STANDALONE),)
