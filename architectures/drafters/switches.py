"""Switches in the configs of EAGLE heads: what each asks for must be there, or the head is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from graphspec.checkpoints import Checkpoint, fields
from graphspec.errors import UnsupportedError

from .names import RenamedCheckpoint


class Biases(TypedDict):
    """Fields of a DecoderConfig."""

    attention_bias: bool
    output_bias: bool


def body(draft: Checkpoint) -> Mapping[str, Any]:
    """Where a head's layer sizes are: speculators and older vLLM conversions nest them."""
    for key in ("transformer_layer_config", "model"):
        if inner := fields.section(draft.config, key):
            return inner
    return draft.config


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the layout of speculators."""
    return config.get("speculators_model_type") is not None


def stated(draft: Checkpoint, *keys: str) -> bool | None:
    """Whether any of these switches is on, wherever the config has them; None if it has none of them.

    Raises CheckpointError for a value that is neither true nor false.
    """
    values = [fields.switch(place, key) for place in _places(draft) for key in keys if place.get(key) is not None]
    return any(values) if values else None


def is_on(draft: Checkpoint, *keys: str) -> bool:
    """Whether the config sets one of these switches."""
    return bool(stated(draft, *keys))


def biases(draft: Checkpoint, tensors: RenamedCheckpoint) -> Biases:
    """Which projections of a head have biases: those whose tensors are there, or that the config promises."""
    promised = is_on(draft, "qkv_bias", "attention_bias")
    return {
        "attention_bias": promised or "layers.0.self_attn.q_proj.bias" in tensors,
        "output_bias": "layers.0.self_attn.o_proj.bias" in tensors,  # only some of those with biases have it
    }


def refuse(draft: Checkpoint, kind: str, *, on: tuple[str, ...], off: tuple[str, ...] = ()) -> None:
    """UnsupportedError naming every switch that asks for what heads of this kind do not do here: those of `on` that
    are set, those of `off` that are set to false, and drafting several tokens in one pass."""
    asked = [f"{key}: true" for key in (*on, "use_mtp_layernorm", "parallel_drafting") if stated(draft, key)]
    asked += [f"{key}: false" for key in off if stated(draft, key) is False]
    for place in _places(draft):
        steps = place.get("parallel_draft_step")
        if not isinstance(steps, bool) and (fields.size_or(place, "parallel_draft_step", None) or 1) > 1:
            asked.append(f"parallel_draft_step: {steps}")
        elif steps is True:
            asked.append("parallel_draft_step: true")
    if asked:
        raise UnsupportedError(f"draft '{draft.name}' asks for {', '.join(asked)}, which {kind} does not do here")


def _places(draft: Checkpoint) -> Iterator[Mapping[str, Any]]:
    yield draft.config
    if (inner := body(draft)) is not draft.config:
        yield inner
    yield fields.section(draft.config, "eagle_config")
