"""From an EAGLE-3 checkpoint, in any of its spellings, to an Eagle3Drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphspec.checkpoints import Checkpoint
from graphspec.detection import TAP_FIELD
from graphspec.errors import CheckpointError
from graphspec.speculative_config import SpeculativeConfig

from ..blocks.decoder import DecoderConfig
from ..blocks.decoder_weights import attention_sources, layer_sources, mlp_sources
from ..target import DecoderTarget
from ..weights import Source, load_parameters, one
from .eagle3 import Eagle3Drafter
from .names import RenamedCheckpoint


def load_drafter(
    target: DecoderTarget, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig
) -> Eagle3Drafter:
    """The head with its weights.

    Raises CheckpointError for missing, unexpected or wrongly shaped tensors, taps that do not exist, a hidden
    size that does not fit shared tensors, or a d2t that points outside the target's vocabulary.
    """
    renamed = RenamedCheckpoint(draft)
    shape = _shape(draft, renamed, target)
    taps = _taps(draft, renamed, target)
    own_head = "lm_head.weight" in renamed
    drafter = Eagle3Drafter(
        shape,
        taps=taps,
        target_hidden=target.config.hidden,
        draft_vocabulary=renamed.tensors["lm_head.weight"].shape[0] if own_head else None,
        own_embedding=_has_own_embedding(renamed, target),
        pruned="d2t" in renamed,
        # A norm that the config promises and the file lacks must be missed, not skipped.
        tap_norms="fc_norm.0.weight" in renamed or _says(draft, "fc_norm", "use_aux_norm"),
        norm_before_fc="input_norm.weight" in renamed or _says(draft, "norm_before_fc"),
        norm_before_residual=bool(draft.config.get("norm_before_residual", False)),
        norm_output=bool(draft.config.get("norm_output", False)),
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
    body: Mapping[str, Any] = draft.config.get("transformer_layer_config") or draft.config
    shape = DecoderConfig.read({**body, "vocab_size": target.config.vocabulary})
    return replace(
        shape,
        qk_norm="layers.0.self_attn.q_norm.weight" in renamed,
        attention_bias="layers.0.self_attn.q_proj.bias" in renamed,
        output_bias="layers.0.self_attn.o_proj.bias" in renamed,
    )


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
    return taps


def _says(draft: Checkpoint, *keys: str) -> bool:
    """Whether the config sets one of these switches, at the top level or in eagle_config."""
    nested = draft.config.get("eagle_config") or {}
    return any(bool(draft.config.get(key) or nested.get(key)) for key in keys)


def _listed_taps(config: Mapping[str, Any], layers: int) -> tuple[int, ...] | None:
    nested = (config.get("eagle_config") or {}).get(TAP_FIELD)
    listed = config.get(TAP_FIELD) or nested
    if not listed:
        return None
    ids = tuple(int(tap) for tap in listed)
    if ids == (2, layers // 2, layers - 3):
        return ids
    # eagle_config comes from SGLang and SpecForge, which name the layer a state leaves; vLLM and speculators
    # write the list at the top level and name the layer it enters.
    leaves = ids == (1, layers // 2 - 1, layers - 4) or ids == tuple(nested or ())
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
    ((_, offsets),) = renamed.load(["d2t"])
    offsets = offsets.to(torch.int64)
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
    return offsets
