"""What a file of Medusa heads holds, from the names of its tensors; imports no torch.

    i.j.linear.weight, .bias    block j of head i
    i.n.weight                  the projection of head i, behind its n blocks

Configs of published files are wrong about the number of heads (checkpoints.md §4.9), so nothing is read of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaLayout:
    """Heads that are all built like the first one; where one is not, its tensors are missing or unexpected."""

    heads: int
    """Those numbered from 0 on without a gap; 0: there are none."""
    blocks: int
    """Of each head, n."""
    one_block: bool
    """Each head is its block 0, n times over: the reference makes one module for all n, and safetensors keeps one name
    of a tensor that has several."""
    bias: bool
    own_output: bool
    """Without it the target's head reads what a head's blocks make."""


def block(head: int, index: int, part: str) -> str:
    """The name of a block's weight or bias."""
    return f"{head}.{index}.linear.{part}"


def output(head: int, blocks: int) -> str:
    """The name of a head's projection."""
    return f"{head}.{blocks}.weight"


def read_layout(names: Collection[str]) -> MedusaLayout:
    """From names without a prefix."""
    heads = next(head for head in count() if block(head, 0, "weight") not in names)
    stored = next(index for index in count() if block(0, index, "weight") not in names)
    ends = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"0\.([1-9]\d*)\.weight", name)))
    blocks = ends[0] if ends else stored
    return MedusaLayout(
        heads=heads,
        blocks=blocks,
        one_block=stored == 1 < blocks,
        bias=block(0, 0, "bias") in names,
        own_output=bool(ends),
    )
