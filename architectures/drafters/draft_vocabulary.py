"""The vocabulary of a draft: its own embedding and head, and d2t that leads from its ids to the target's."""

from __future__ import annotations

import torch

from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError

from ..target import DecoderTarget
from .names import RenamedCheckpoint
from .switches import stated


def has_own_head(draft: Checkpoint, renamed: RenamedCheckpoint) -> bool:
    """By the tensor; a config that says something else is wrong about its own file."""
    found, said = "lm_head.weight" in renamed, stated(draft, "has_lm_head")
    if said is not None and said != found:
        raise CheckpointError(
            f"draft '{draft.name}' says has_lm_head: {str(said).lower()}, and its lm_head.weight is "
            f"{'there' if found else 'missing'}"
        )
    return found


def has_own_embedding(renamed: RenamedCheckpoint, target: DecoderTarget) -> bool:
    """Whether the draft ships an embedding that is not a copy of the target's (checkpoints.md §2.4)."""
    if "embed_tokens.weight" not in renamed:
        return False
    if renamed.tensors["embed_tokens.weight"].shape != tuple(target.embedding.weight.shape):
        return True
    ((_, own),) = renamed.load(["embed_tokens.weight"])
    # A copy was rounded to the draft's dtype: compare there.
    return not torch.equal(own, target.embedding.weight.to(own.dtype))


def check_shared(
    draft: Checkpoint, target: DecoderTarget, *, hidden: int, own_embedding: bool, head_rows: int | None, pruned: bool
) -> None:
    """Raises CheckpointError where what the draft has not of its own cannot be the target's; `head_rows` are those of
    its own head, None: it has none."""
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


def read_offsets(renamed: RenamedCheckpoint, head_rows: int | None, target: DecoderTarget) -> torch.Tensor:
    """d2t i64[Vd] holds offsets: target id = draft id + d2t[draft id] (checkpoints.md §4.2)."""
    ((_, stored),) = renamed.load(["d2t"])
    if stored.is_floating_point() or stored.dtype == torch.bool:
        raise CheckpointError(f"draft '{renamed.name}': d2t is stored as {_dtype(stored)}, and token ids are integers")
    offsets: torch.Tensor = stored.to(torch.int64)
    if offsets.shape != (head_rows,):
        raise CheckpointError(
            f"draft '{renamed.name}': d2t has {tuple(offsets.shape)} entries for a head of {head_rows or 0} tokens"
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
