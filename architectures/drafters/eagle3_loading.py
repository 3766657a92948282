"""From an EAGLE-3 checkpoint, in any of its spellings, to an Eagle3Drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphspec.checkpoints import Checkpoint, fields
from graphspec.detection import TAP_FIELD
from graphspec.errors import CheckpointError
from graphspec.speculative_config import SpeculativeConfig

from ..blocks.decoder import DecoderConfig
from ..blocks.decoder_weights import attention_sources, layer_sources, mlp_sources
from ..target import DecoderTarget
from ..weights import Source, load_parameters, one
from .eagle3 import Eagle3Drafter
from .fit import LEAST_LAYERS
from .names import RenamedCheckpoint
from .switches import biases, body, is_on, refuse, stated


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
    own_head = _has_own_head(draft, renamed)
    drafter = Eagle3Drafter(
        shape,
        taps=taps,
        target_hidden=target.config.hidden,
        draft_vocabulary=renamed.tensors["lm_head.weight"].shape[0] if own_head else None,
        own_embedding=_has_own_embedding(renamed, target),
        pruned="d2t" in renamed,
        # A norm that the config promises and the file lacks must be missed, not skipped.
        tap_norms="fc_norm.0.weight" in renamed or is_on(draft, "fc_norm", "use_aux_norm"),
        norm_before_fc="input_norm.weight" in renamed or is_on(draft, "norm_before_fc"),
        norm_before_residual=is_on(draft, "norm_before_residual"),
        norm_output=is_on(draft, "norm_output"),
        fc_bias="fc.bias" in renamed,
        num_draft_tokens=num_draft_tokens,
        capacity=target.capacity,
    )
    _check_shared(draft, drafter, target)
    load_parameters(drafter, renamed, sources(drafter), ignored=_is_known_extra)
    if drafter.pruned:
        drafter.offsets = _offsets(renamed, drafter, target)
    return drafter


def _shape(draft: Checkpoint, renamed: RenamedCheckpoint, target: DecoderTarget) -> DecoderConfig:
    shape = DecoderConfig.read({**body(draft), "vocab_size": target.config.vocabulary})
    qk_norm = "layers.0.self_attn.q_norm.weight" in renamed
    return replace(shape, qk_norm=qk_norm, **biases(draft, renamed))


def _has_own_head(draft: Checkpoint, renamed: RenamedCheckpoint) -> bool:
    """By the tensor; a config that says something else is wrong about its own file."""
    found, said = "lm_head.weight" in renamed, stated(draft, "has_lm_head")
    if said is not None and said != found:
        raise CheckpointError(
            f"draft '{draft.name}' says has_lm_head: {str(said).lower()}, and its lm_head.weight is "
            f"{'there' if found else 'missing'}"
        )
    return found


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


def _has_own_embedding(renamed: RenamedCheckpoint, target: DecoderTarget) -> bool:
    """Whether the draft ships an embedding that is not a copy of the target's (checkpoints.md §2.4)."""
    if "embed_tokens.weight" not in renamed:
        return False
    if renamed.tensors["embed_tokens.weight"].shape != tuple(target.embedding.weight.shape):
        return True
    ((_, own),) = renamed.load(["embed_tokens.weight"])
    # A copy was rounded to the draft's dtype: compare there.
    return not torch.equal(own, target.embedding.weight.to(own.dtype))


def _check_shared(draft: Checkpoint, drafter: Eagle3Drafter, target: DecoderTarget) -> None:
    shared = [n for n, part in (("embed_tokens", drafter.embedding), ("lm_head", drafter.head)) if part is None]
    if shared and drafter.config.hidden != target.config.hidden:
        raise CheckpointError(
            f"draft '{draft.name}' has hidden size {drafter.config.hidden} and no {' or '.join(shared)} of its own, "
            f"so it would need the target's hidden size {target.config.hidden}"
        )
    if drafter.head is None or drafter.pruned:
        return
    if (found := drafter.head.weight.shape[0]) != target.config.vocabulary:
        raise CheckpointError(
            f"draft '{draft.name}': its lm_head has {found} rows, the target's vocabulary {target.config.vocabulary}, "
            "and there is no d2t that maps one to the other"
        )


def sources(drafter: Eagle3Drafter) -> dict[str, Source]:
    """Where every parameter of a head comes from, in canonical names; training writes them back there."""
    config = drafter.config
    found = {f"fc.{part}": one(f"fc.{part}") for part, _ in drafter.fc.named_parameters()}
    found |= attention_sources("first.attention", "layers.0.self_attn", config)
    found |= mlp_sources("first.mlp", "layers.0.mlp", config)
    found["first.input_norm.weight"] = one("layers.0.input_layernorm.weight")
    found["first.hidden_norm.weight"] = one("layers.0.hidden_norm.weight")
    found["first.mlp_norm.weight"] = one("layers.0.post_attention_layernorm.weight")
    for index in range(1, config.layers):
        found |= layer_sources(f"rest.{index - 1}", f"layers.{index}", config)
    found["norm.weight"] = one("norm.weight")
    if drafter.head is not None:
        found["head.weight"] = one("lm_head.weight")
    if drafter.embedding is not None:
        found["embedding.weight"] = one("embed_tokens.weight")
    if drafter.before_fc is not None:
        found["before_fc.weight"] = one("input_norm.weight")
    for index in range(len(drafter.tap_norms)):
        found[f"tap_norms.{index}.weight"] = one(f"fc_norm.{index}.weight")
    return found


def _is_known_extra(name: str) -> bool:
    """d2t is loaded apart, t2d is for training, embed_tokens is here a copy of the target's."""
    return name in ("d2t", "t2d", "embed_tokens.weight") or name.endswith("inv_freq")


def _offsets(renamed: RenamedCheckpoint, drafter: Eagle3Drafter, target: DecoderTarget) -> torch.Tensor:
    """d2t holds offsets: target id = draft id + d2t[draft id] (checkpoints.md §4.2)."""
    ((_, stored),) = renamed.load(["d2t"])
    if stored.is_floating_point() or stored.dtype == torch.bool:
        raise CheckpointError(f"draft '{renamed.name}': d2t is stored as {_dtype(stored)}, and token ids are integers")
    offsets: torch.Tensor = stored.to(torch.int64)
    if drafter.head is None or offsets.shape != drafter.head.weight.shape[:1]:
        raise CheckpointError(
            f"draft '{renamed.name}': d2t has {tuple(offsets.shape)} entries for a head of "
            f"{0 if drafter.head is None else drafter.head.weight.shape[0]} tokens"
        )
    ids = torch.arange(len(offsets)) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= target.config.vocabulary:
        outside = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise CheckpointError(
            f"draft '{renamed.name}': d2t points at token {outside}, and the target's vocabulary ends at "
            f"{target.config.vocabulary - 1}; the draft was made for another target"
        )
    counts = torch.bincount(ids, minlength=target.config.vocabulary)
    if int(counts.max()) > 1:
        raise CheckpointError(
            f"draft '{renamed.name}': d2t points at token {int(counts.argmax())} {int(counts.max())} times; each "
            "token of the draft is another one of the target"
        )
    if "t2d" in renamed:
        _check_mask(renamed, counts > 0)
    return offsets


def _check_mask(renamed: RenamedCheckpoint, drafted: torch.Tensor) -> None:
    """t2d says which of the target's tokens the draft has: bool[V]. It is not needed, but must agree with d2t."""
    ((_, mask),) = renamed.load(["t2d"])
    if mask.shape != drafted.shape or mask.is_floating_point():
        raise CheckpointError(
            f"draft '{renamed.name}': t2d is {_dtype(mask)} of shape {list(mask.shape)}, and is a mask of the target's "
            f"{len(drafted)} tokens; the draft was made for another target"
        )
    if wrong := int(((mask != 0) != drafted).sum()):
        raise CheckpointError(
            f"draft '{renamed.name}': t2d and d2t differ in {wrong} tokens; the draft's files do not belong together"
        )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
