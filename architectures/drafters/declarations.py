"""The kinds of drafters there are, and how a target gets its architectures; imports no torch.

A target's arch.py says `ARCHITECTURES = declare(TARGET, EAGLE, EAGLE3)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphspec.architecture import STEP_CAPABILITIES, Architecture, Capability, DrafterKind, Facts, TargetKind
from graphspec.checkpoints import Checkpoint
from graphspec.detection import classify_draft, plain_names
from graphspec.speculative_config import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculativeConfig

from .dflash_config import block_size
from .fit import dflash_misfits, eagle3_misfits, eagle_misfits, medusa_misfits, standalone_misfits
from .medusa_tensors import read_layout


def declare(
    target: TargetKind, *drafters: DrafterKind, capabilities: frozenset[Capability] = STEP_CAPABILITIES
) -> tuple[Architecture, ...]:
    """The target with each of `drafters`, and with those that need nothing of it: standalone and n-gram."""
    return tuple(
        Architecture(target=target, drafter=drafter, capabilities=capabilities)
        for drafter in (*drafters, STANDALONE, NGRAM)
    )


def classified_as(kind: str) -> Callable[[Facts, Facts], bool]:
    """Whether detection calls a draft checkpoint `kind`."""
    return lambda target, draft: classify_draft(target, draft) == kind


def _load_eagle(target: Any, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig) -> Any:
    from .eagle import load_drafter

    return load_drafter(target, draft, num_draft_tokens, config)


def _load_eagle3(target: Any, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig) -> Any:
    from .eagle3_loading import load_drafter

    return load_drafter(target, draft, num_draft_tokens, config)


def _load_dflash(target: Any, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig) -> Any:
    from .dflash_loading import load_drafter

    return load_drafter(target, draft, num_draft_tokens, config)


def _load_medusa(target: Any, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig) -> Any:
    from .medusa_loading import load_drafter

    return load_drafter(target, draft, num_draft_tokens, config)


def _load_standalone(
    target: Any, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig, kind: TargetKind | None = None
) -> Any:
    from .standalone import load_drafter

    return load_drafter(target, draft, num_draft_tokens, config, kind)


def _load_ngram(target: Any, draft: None, num_draft_tokens: int, config: SpeculativeConfig) -> Any:
    from .ngram import load_drafter

    return load_drafter(target, draft, num_draft_tokens, config)


def _drafts_in_a_block(draft: Facts) -> int | None:
    """All of a block but the pending token (checkpoints.md §1.5)."""
    size = block_size(draft.config)
    return None if size is None else size - 1


def _a_token_of_each_head(draft: Facts) -> int:
    return read_layout(plain_names(draft)).heads


def _no_draft(_target: Facts, _draft: Facts) -> bool:
    return False


EAGLE = DrafterKind(
    name="eagle",
    label="Eagle",
    methods=("eagle",),
    draft_checkpoint=True,
    matches=classified_as("eagle"),
    default_num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS["eagle"],
    load=_load_eagle,
    misfits=eagle_misfits,
)
EAGLE3 = DrafterKind(
    name="eagle3",
    label="Eagle3",
    # "eagle" covers both generations: the draft decides. "eagle3" insists.
    methods=("eagle3", "eagle"),
    draft_checkpoint=True,
    matches=classified_as("eagle3"),
    default_num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS["eagle3"],
    load=_load_eagle3,
    misfits=eagle3_misfits,
)
DFLASH = DrafterKind(
    name="dflash",
    label="Dflash",
    methods=("dflash",),
    draft_checkpoint=True,
    matches=classified_as("dflash"),
    default_num_speculative_tokens=None,
    trained_num_speculative_tokens=_drafts_in_a_block,
    load=_load_dflash,
    misfits=dflash_misfits,
)
MEDUSA = DrafterKind(
    name="medusa",
    label="Medusa",
    methods=("medusa",),
    draft_checkpoint=True,
    matches=classified_as("medusa"),
    default_num_speculative_tokens=None,
    most_num_speculative_tokens=_a_token_of_each_head,
    load=_load_medusa,
    misfits=medusa_misfits,
)
STANDALONE = DrafterKind(
    name="standalone",
    label="Standalone",
    methods=("standalone",),
    draft_checkpoint=True,
    matches=classified_as("standalone"),
    default_num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS["standalone"],
    load=_load_standalone,
    misfits=standalone_misfits,
    draft_is_target=True,
)
NGRAM = DrafterKind(
    name="ngram",
    label="Ngram",
    methods=("ngram",),
    draft_checkpoint=False,
    matches=_no_draft,
    default_num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS["ngram"],
    load=_load_ngram,
)
