"""From a DFlash checkpoint, as z-lab or as speculators write it, to a DFlashDrafter."""

from __future__ import annotations

from dataclasses import replace

from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig

from ..blocks.decoder import DecoderConfig
from ..blocks.decoder_weights import layer_sources
from ..target import DecoderTarget
from ..weights import Source, one
from .dflash import DFlashDrafter
from .dflash_config import MASK_FIELD, entered_layers, mask_token, tap_field, unsupported
from .draft_vocabulary import end_sources, load_drafter_parameters, read_ends
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
    taps, mask = _taps(draft, renamed, target, shape.layers), _mask(draft, target)
    drafter = DFlashDrafter(
        shape,
        read_ends(draft, renamed, target, hidden=shape.hidden),
        taps=taps,
        target_hidden=target.config.hidden,
        mask_token=mask,
        num_draft_tokens=num_draft_tokens,
        capacity=target.capacity,
    )
    load_drafter_parameters(drafter, renamed, target, sources(drafter))
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
    found = end_sources(drafter)
    found |= {"fc.weight": one("fc.weight"), "context_norm.weight": one("hidden_norm.weight")}
    for index in range(drafter.config.layers):
        found |= layer_sources(f"layers.{index}", f"layers.{index}", drafter.config)
    return found
