"""Which settings an architecture can honour: what of it each needs, and the refusals by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args, get_origin

from graphspec.architecture import Architecture, Capability
from graphspec.errors import UnsupportedError
from graphspec.speculative_config import DEPENDS_ON, METHOD_OF, METHODS, SpeculativeConfig

_MACHINERY: tuple[tuple[str, Capability, Callable[[SpeculativeConfig], bool]], ...] = (
    ("num_speculative_tokens_per_batch_size", "width_schedule", lambda c: c.verify_width_schedule is not None),
    (
        "num_speculative_tokens_per_batch_size",
        "zero_draft_rows",
        lambda c: any(count == 0 for _, _, count in c.verify_width_schedule or ()),
    ),
    ("adaptive_speculative_widths", "adaptive_widths", lambda c: c.adaptive_speculative_widths is not None),
    ("num_speculative_tokens_mixed_batch", "mixed_batches", lambda c: c.num_speculative_tokens_mixed_batch is not None),
    ("synthetic_acceptance_rate", "synthetic_acceptance", lambda c: c.synthetic_acceptance_rate is not None),
    ("use_relaxed_acceptance_for_thinking", "relaxed_thinking", lambda c: c.use_relaxed_acceptance_for_thinking),
    ("use_greedy_acceptance", "greedy_acceptance", lambda c: c.use_greedy_acceptance),
    ("draft_proposal", "sampled_proposal", lambda c: c.draft_proposal == "sampled"),
    ("draft_head_parallelism", "replica_draft_head", lambda c: c.draft_head_parallelism == "replica"),
    ("draft_probs_layout", "replica_draft_probs", lambda c: c.draft_probs_layout == "replica"),
    ("logit_penalties", "penalties", lambda c: c.logit_penalties),
)
"""Which settings need what of an architecture."""
_INSTEAD: Mapping[Capability, str] = {
    "width_schedule": "every bundle runs by a schedule of its widths: `graphspec run --width 1:4,8:2`",
    "adaptive_widths": "every bundle chooses among its widths: `graphspec run --width auto`",
    "synthetic_acceptance": "bundles for onnxruntime are measured so: `graphspec bench --synthetic-acceptance-rate`",
}
"""What does the same for bundles that were built without it."""


def required_machinery(config: SpeculativeConfig) -> list[tuple[str, Capability]]:
    """What the settings need of an architecture, each with the flag that asks for it."""
    return [(_flag(field), capability) for field, capability, is_needed in _MACHINERY if is_needed(config)]


def refuse_unsupported(config: SpeculativeConfig, architecture: Architecture) -> None:
    """UnsupportedError naming every flag whose machinery `architecture` does not have."""
    missing = [need for need in required_machinery(config) if need[1] not in architecture.capabilities]
    said = [
        f"{flag} is not supported by architecture {architecture.name} (it lacks {capability})"
        for flag, capability in missing
    ]
    instead = [_INSTEAD[capability] for _, capability in missing if capability in _INSTEAD]
    if missing:
        raise UnsupportedError(
            "; ".join([*said, "drop the flag, or choose an architecture that has it (graphspec archs)", *instead])
        )


def refuse_other_methods(given: Mapping[str, object], architecture: Architecture) -> None:
    """UnsupportedError naming every setting, whatever its value, that only methods of other architectures have."""
    foreign = [
        f"{_flag(name)} is not supported by architecture {architecture.name} (it is for method {method})"
        for name, method in METHOD_OF.items()
        if given.get(name) is not None and method not in architecture.methods
    ]
    if foreign:
        raise UnsupportedError(
            "; ".join(foreign) + "; drop the flag, or choose an architecture that has it (graphspec archs)"
        )


def unsupported(architectures: Iterable[Architecture]) -> dict[str, str]:
    """By field, which of its values no architecture of these can honour; "" where that is all but the default."""
    known = tuple(architectures)
    capabilities = {capability for architecture in known for capability in architecture.capabilities}
    methods = {method for architecture in known for method in architecture.methods}
    found = {"speculative_method": ", ".join(method for method in METHODS if method not in methods)}
    first_need = {field: capability for field, capability, _ in reversed(_MACHINERY)}
    for name, capability in first_need.items():
        if capability not in capabilities:
            field = SpeculativeConfig.model_fields[name]
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            found[name] = ", ".join(choice for choice in choices if choice != field.default)
    found |= {name: "" for name, needed in DEPENDS_ON.items() if needed in found}
    return {name: values for name, values in found.items() if values or name != "speculative_method"}


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
