"""From an EAGLE-3 checkpoint, in any of its spellings, to an Eagle3Drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphspec.checkpoints import Checkpoint, fields
from graphspec.detection import TAP_FIELD
from graphspec.errors import CheckpointError
from graphspec.speculative_config import SpeculativeConfig

from ..blocks.decoder import DecoderConfig
from ..blocks.decoder_weights import attention_sources, layer_sources, mlp_sources
from ..target import DecoderTarget
from ..weights import Source, one
from .draft_vocabulary import end_sources, load_drafter_parameters, read_ends
from .eagle3 import Eagle3Drafter
from .fit import LEAST_LAYERS
from .names import RenamedCheckpoint
from .switches import biases, body, is_on, refuse


def load_drafter(
    target: DecoderTarget, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig
) -> Eagle3Drafter:
    """The head with its weights.

    Raises CheckpointError for missing, unexpected or wrongly shaped tensors, taps that do not exist, a hidden
    size that does not fit shared tensors, or a d2t that does not name tokens of the target, each once;
    UnsupportedError for a head that says it does what none does here.
    """
    refuse(
        draft,
        "an EAGLE-3 head",
        on=(),
        off=("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    )
    renamed = RenamedCheckpoint(draft)
    shape = _shape(draft, renamed, target)
    taps = _taps(draft, renamed, target)
    drafter = Eagle3Drafter(
        shape,
        read_ends(draft, renamed, target, hidden=shape.hidden),
        taps=taps,
        target_hidden=target.config.hidden,
        # A norm that the config promises and the file lacks must be missed, not skipped.
        tap_norms="fc_norm.0.weight" in renamed or is_on(draft, "fc_norm", "use_aux_norm"),
        norm_before_fc="input_norm.weight" in renamed or is_on(draft, "norm_before_fc"),
        norm_before_residual=is_on(draft, "norm_before_residual"),
        norm_output=is_on(draft, "norm_output"),
        fc_bias="fc.bias" in renamed,
        num_draft_tokens=num_draft_tokens,
        capacity=target.capacity,
    )
    load_drafter_parameters(drafter, renamed, target, sources(drafter))
    return drafter


def _shape(draft: Checkpoint, renamed: RenamedCheckpoint, target: DecoderTarget) -> DecoderConfig:
    shape = DecoderConfig.read({**body(draft), "vocab_size": target.config.vocabulary})
    qk_norm = "layers.0.self_attn.q_norm.weight" in renamed
    return replace(shape, qk_norm=qk_norm, **biases(draft, renamed))


def _taps(draft: Checkpoint, renamed: RenamedCheckpoint, target: DecoderTarget) -> tuple[int, ...]:
    """Canonical IN ids: hidden states entering these layers (checkpoints.md §0.1, §4.2)."""
    layers, hidden = target.config.layers, target.config.hidden
    if "fc.weight" not in renamed:
        raise CheckpointError(f"draft '{draft.name}' has no fc.weight: it is not an EAGLE-3 head")
    fc = renamed.tensors["fc.weight"].shape
    if len(fc) != 2:
        raise CheckpointError(
            f"draft '{draft.name}': fc.weight has shape {list(fc)}, and an EAGLE-3 head's is a matrix"
        )
    inputs = fc[1]
    count, rest = divmod(inputs, hidden)
    if rest or not count:
        raise CheckpointError(
            f"draft '{draft.name}': fc reads {inputs} values, which is no multiple of the target's hidden size "
            f"{hidden}; the draft was made for another target"
        )
    taps = _listed_taps(draft.config, layers)
    if taps is None and count == 3:
        taps = (2, layers // 2, layers - 3)
        if layers < LEAST_LAYERS:
            raise CheckpointError(
                f"draft '{draft.name}' names no target layers ({TAP_FIELD}), and the usual three, {list(taps)}, are "
                f"not three in a row: the target has {layers} layers, and that takes {LEAST_LAYERS}"
            )
    if taps is None or len(taps) != count:
        raise CheckpointError(
            f"draft '{draft.name}': fc reads {count} hidden states and its config names "
            f"{'none' if taps is None else len(taps)} ({TAP_FIELD})"
        )
    if wrong := [tap for tap in taps if not 0 <= tap <= layers]:
        raise CheckpointError(
            f"draft '{draft.name}' taps layers {wrong} ({TAP_FIELD}), and the target has {layers}; "
            "the draft was made for another target"
        )
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(
            f"draft '{draft.name}' taps layers {list(taps)} ({TAP_FIELD}): they must be in ascending order, each once"
        )
    if (number := fields.size_or(draft.config, "num_aux_hidden_states", None)) not in (None, count):
        raise CheckpointError(
            f"draft '{draft.name}': fc reads {count} hidden states and its config says num_aux_hidden_states {number}"
        )
    return taps


def _listed_taps(config: Mapping[str, Any], layers: int) -> tuple[int, ...] | None:
    nested = fields.whole_numbers(fields.section(config, "eagle_config"), TAP_FIELD)
    ids = tuple(fields.whole_numbers(config, TAP_FIELD) or nested)
    if not ids:
        return None
    if ids == (2, layers // 2, layers - 3):
        return ids
    # eagle_config comes from SGLang and SpecForge, which name the layer a state leaves; vLLM and speculators
    # write the list at the top level and name the layer it enters.
    leaves = ids == (1, layers // 2 - 1, layers - 4) or ids == tuple(nested)
    return tuple(tap + 1 for tap in ids) if leaves else ids


def sources(drafter: Eagle3Drafter) -> dict[str, Source]:
    """Where every parameter of a head comes from, in canonical names; training writes them back there."""
    config = drafter.config
    found = end_sources(drafter)
    found |= {f"fc.{part}": one(f"fc.{part}") for part, _ in drafter.fc.named_parameters()}
    found |= attention_sources("first.attention", "layers.0.self_attn", config)
    found |= mlp_sources("first.mlp", "layers.0.mlp", config)
    found["first.input_norm.weight"] = one("layers.0.input_layernorm.weight")
    found["first.hidden_norm.weight"] = one("layers.0.hidden_norm.weight")
    found["first.mlp_norm.weight"] = one("layers.0.post_attention_layernorm.weight")
    for index in range(1, config.layers):
        found |= layer_sources(f"rest.{index - 1}", f"layers.{index}", config)
    if drafter.before_fc is not None:
        found["before_fc.weight"] = one("input_norm.weight")
    for index in range(len(drafter.tap_norms)):
        found[f"tap_norms.{index}.weight"] = one(f"fc_norm.{index}.weight")
    return found
