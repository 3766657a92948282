"""From a DFlash checkpoint, as z-lab or as speculators write it, to a DFlashDrafter."""

from __future__ import annotations

from dataclasses import replace

from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig

from ..blocks.decoder import DecoderConfig
from ..blocks.decoder_weights import layer_sources
from ..target import DecoderTarget
from ..weights import Source, load_parameters, one
from .dflash import DFlashDrafter
from .dflash_config import MASK_FIELD, entered_layers, mask_token, tap_field, unsupported
from .draft_vocabulary import check_shared, has_own_embedding, has_own_head, read_offsets
from .names import RenamedCheckpoint
from .switches import biases, body

_MASK_FILE = "mask_embedding.pt"


def load_drafter(
    target: DecoderTarget, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig
) -> DFlashDrafter:
    """The draft with its weights.

    Raises CheckpointError for missing, unexpected or wrongly shaped tensors, target layers that do not exist, a mask
    that is no token of the target, or a d2t that does not name tokens of the target, each once; UnsupportedError for
    a draft that asks for another block than the one here.
    """
    _refuse(draft)
    renamed = RenamedCheckpoint(draft)
    shape = _shape(draft, renamed, target)
    own_embedding = has_own_embedding(renamed, target)
    head_rows = renamed.tensors["lm_head.weight"].shape[0] if has_own_head(draft, renamed) else None
    drafter = DFlashDrafter(
        shape,
        taps=_taps(draft, renamed, target, shape.layers),
        target_hidden=target.config.hidden,
        mask_token=_mask(draft, target),
        draft_vocabulary=head_rows,
        own_embedding=own_embedding,
        pruned="d2t" in renamed,
        num_draft_tokens=num_draft_tokens,
        capacity=target.capacity,
    )
    check_shared(
        draft,
        target,
        hidden=shape.hidden,
        own_embedding=own_embedding,
        head_rows=head_rows,
        pruned=drafter.pruned,
    )
    load_parameters(drafter, renamed, sources(drafter), ignored=_is_known_extra)
    if drafter.pruned:
        drafter.offsets = read_offsets(renamed, head_rows, target)
    return drafter


def _refuse(draft: Checkpoint) -> None:
    if asked := unsupported(draft.config):
        raise UnsupportedError(
            f"draft '{draft.name}' asks for {', '.join(asked)}, which a DFlash draft does not do here"
        )
    if any((file.parent / _MASK_FILE).exists() for file in draft.files):
        raise UnsupportedError(
            f"draft '{draft.name}' has an embedding of its own for masks ({_MASK_FILE}), and masks are embedded by the "
            f"target's {MASK_FIELD} here; a draft trained with that is read without the file"
        )


def _shape(draft: Checkpoint, renamed: RenamedCheckpoint, target: DecoderTarget) -> DecoderConfig:
    shape = DecoderConfig.read({**body(draft), "vocab_size": target.config.vocabulary}, qk_norm=True)
    return replace(shape, **biases(draft, renamed))


def _taps(draft: Checkpoint, renamed: RenamedCheckpoint, target: DecoderTarget, draft_layers: int) -> tuple[int, ...]:
    """Canonical IN ids: hidden states entering these layers (checkpoints.md §0.1)."""
    layers, field = target.config.layers, tap_field(draft.config)
    taps = entered_layers(draft.config, target_layers=layers, draft_layers=draft_layers)
    fc = renamed.tensors["fc.weight"].shape if "fc.weight" in renamed else ()
    if len(fc) != 2 or fc[1] != len(taps) * target.config.hidden:
        raise CheckpointError(
            f"draft '{draft.name}': its fc.weight is {list(fc)}, and it reads {len(taps)} hidden states of size "
            f"{target.config.hidden} ({field}); the draft was made for another target"
        )
    if wrong := [tap for tap in taps if not 0 <= tap <= layers]:
        raise CheckpointError(
            f"draft '{draft.name}' reads what enters layers {wrong} ({field}), and the target has {layers}; "
            "the draft was made for another target"
        )
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(
            f"draft '{draft.name}' reads what enters layers {list(taps)} ({field}): they must be in ascending order, "
            "each once"
        )
    return taps


def _mask(draft: Checkpoint, target: DecoderTarget) -> int:
    token = mask_token(draft.config)
    if token is None or token >= target.config.vocabulary:
        raise CheckpointError(
            f"draft '{draft.name}' says {MASK_FIELD} is {token}, and its masks must be a token of the target: 0 to "
            f"{target.config.vocabulary - 1}"
        )
    return token


def sources(drafter: DFlashDrafter) -> dict[str, Source]:
    """Where each parameter is stored, under canonical names (RenamedCheckpoint)."""
    found = {
        "fc.weight": one("fc.weight"),
        "context_norm.weight": one("hidden_norm.weight"),
        "norm.weight": one("norm.weight"),
    }
    for index in range(drafter.config.layers):
        found |= layer_sources(f"layers.{index}", f"layers.{index}", drafter.config)
    if drafter.head is not None:
        found["head.weight"] = one("lm_head.weight")
    if drafter.embedding is not None:
        found["embedding.weight"] = one("embed_tokens.weight")
    return found


def _is_known_extra(name: str) -> bool:
    """d2t is loaded apart, t2d is for training, embed_tokens is here a copy of the target's."""
    return name in ("d2t", "t2d", "embed_tokens.weight") or name.endswith("inv_freq")
