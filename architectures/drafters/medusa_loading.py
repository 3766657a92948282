"""From a checkpoint of Medusa heads to a MedusaDrafter."""

from __future__ import annotations

from graphspec.checkpoints import Checkpoint
from graphspec.errors import ConfigError
from graphspec.speculative_config import SpeculativeConfig

from ..target import DecoderTarget
from ..weights import Source, load_parameters, one
from .medusa import MedusaDrafter
from .medusa_tensors import block, output, read_layout
from .names import RenamedCheckpoint


def load_drafter(
    target: DecoderTarget, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig
) -> MedusaDrafter:
    """The first K heads with their weights; the file's others are not read.

    Raises CheckpointError for missing, unexpected or wrongly shaped tensors, ConfigError for more tokens than heads.
    """
    renamed = RenamedCheckpoint(draft)
    layout = read_layout(renamed.tensors)
    if num_draft_tokens > layout.heads:
        raise ConfigError(
            f"draft '{draft.name}' has {layout.heads} Medusa heads, and {num_draft_tokens} tokens need as many"
        )
    drafter = MedusaDrafter(
        target.config.hidden,
        num_draft_tokens=num_draft_tokens,
        blocks=layout.blocks,
        bias=layout.bias,
        vocabulary=target.config.vocabulary if layout.own_output else None,
    )
    unused = {str(head) for head in range(num_draft_tokens, layout.heads)}
    load_parameters(
        drafter,
        renamed,
        sources(drafter, one_block=layout.one_block),
        ignored=lambda name: name.partition(".")[0] in unused,
    )
    return drafter


def sources(drafter: MedusaDrafter, *, one_block: bool = False) -> dict[str, Source]:
    """Where every parameter is stored, in names without a prefix; `one_block` as in MedusaLayout."""
    heads = range(drafter.num_draft_tokens)
    rows = (drafter.hidden,) * len(heads)
    parts = [part for part, _ in drafter.first.named_parameters()]
    found = {f"first.{part}": Source(tuple(block(head, 0, part) for head in heads), rows) for part in parts}
    for head in heads:
        for index in range(1, drafter.blocks):
            stored = 0 if one_block else index
            found |= {f"heads.{head}.rest.{index - 1}.{part}": one(block(head, stored, part)) for part in parts}
        if drafter.own_output:
            found[f"heads.{head}.output.weight"] = one(output(head, drafter.blocks))
    return found
