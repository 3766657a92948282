"""The vocabulary of a draft: its own embedding and head, and d2t that leads from its ids to the target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError

from ..target import DecoderTarget
from ..weights import Source, load_parameters, one
from .ends import Ends, TappingDrafter
from .names import RenamedCheckpoint
from .switches import stated


def read_ends(draft: Checkpoint, renamed: RenamedCheckpoint, target: DecoderTarget, *, hidden: int) -> Ends:
    """Which ends a draft of hidden size `hidden` has. Raises CheckpointError where those that it has not cannot be the
    target's, or its head says other tokens than the target and no d2t leads there."""
    own_embedding = _has_own_embedding(renamed, target)
    head_rows = renamed.tensors["lm_head.weight"].shape[0] if _has_own_head(draft, renamed) else None
    pruned = "d2t" in renamed
    shared = [n for n, own in (("embed_tokens", own_embedding), ("lm_head", head_rows is not None)) if not own]
    if shared and hidden != target.config.hidden:
        raise CheckpointError(
            f"draft '{draft.name}' has hidden size {hidden} and no {' or '.join(shared)} of its own, "
            f"so it would need the target's hidden size {target.config.hidden}"
        )
    if head_rows is not None and not pruned and head_rows != target.config.vocabulary:
        raise CheckpointError(
            f"draft '{draft.name}': its lm_head has {head_rows} rows, the target's vocabulary "
            f"{target.config.vocabulary}, and there is no d2t that maps one to the other"
        )
    return Ends(embedding=own_embedding, head_rows=head_rows, pruned=pruned)


def load_drafter_parameters(
    drafter: TappingDrafter, renamed: RenamedCheckpoint, target: DecoderTarget, sources: Mapping[str, Source]
) -> None:
    """weights.load_parameters, and d2t."""
    load_parameters(drafter, renamed, sources, ignored=_is_known_extra)
    if drafter.pruned:
        drafter.offsets = _read_offsets(renamed, len(drafter.offsets), target)


def end_sources(drafter: TappingDrafter) -> dict[str, Source]:
    """Where norm, head and embedding are stored, under canonical names (RenamedCheckpoint)."""
    found = {"norm.weight": one("norm.weight")}
    if drafter.head is not None:
        found["head.weight"] = one("lm_head.weight")
    if drafter.embedding is not None:
        found["embedding.weight"] = one("embed_tokens.weight")
    return found


def _is_known_extra(name: str) -> bool:
    """d2t is loaded apart, t2d is for training, embed_tokens is here a copy of the target's."""
    return name in ("d2t", "t2d", "embed_tokens.weight") or name.endswith("inv_freq")


def _has_own_head(draft: Checkpoint, renamed: RenamedCheckpoint) -> bool:
    """By the tensor; a config that says something else is wrong about its own file."""
    found, said = "lm_head.weight" in renamed, stated(draft, "has_lm_head")
    if said is not None and said != found:
        raise CheckpointError(
            f"draft '{draft.name}' says has_lm_head: {str(said).lower()}, and its lm_head.weight is "
            f"{'there' if found else 'missing'}"
        )
    return found


def _has_own_embedding(renamed: RenamedCheckpoint, target: DecoderTarget) -> bool:
    """Whether the draft ships an embedding that is not a copy of the target's (checkpoints.md §2.4)."""
    if "embed_tokens.weight" not in renamed:
        return False
    if renamed.tensors["embed_tokens.weight"].shape != tuple(target.embedding.weight.shape):
        return True
    ((_, own),) = renamed.load(["embed_tokens.weight"])
    # A copy was rounded to the draft's dtype: compare there.
    return not torch.equal(own, target.embedding.weight.to(own.dtype))


def _read_offsets(renamed: RenamedCheckpoint, head_rows: int, target: DecoderTarget) -> torch.Tensor:
    """d2t i64[Vd] holds offsets: target id = draft id + d2t[draft id] (checkpoints.md §4.2)."""
    ((_, stored),) = renamed.load(["d2t"])
    if stored.is_floating_point() or stored.dtype == torch.bool:
        raise CheckpointError(f"draft '{renamed.name}': d2t is stored as {_dtype(stored)}, and token ids are integers")
    offsets: torch.Tensor = stored.to(torch.int64)
    if offsets.shape != (head_rows,):
        raise CheckpointError(
            f"draft '{renamed.name}': d2t has {tuple(offsets.shape)} entries for a head of {head_rows} tokens"
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
