"""DFlash drafts (arXiv 2602.06036): blocks behind many positions of a text are taught in one pass."""

from __future__ import annotations

from graphspec.distill.method import Method

from .drafts import draft_config, new_drafter, save_draft
from .loss import loss

METHOD = Method(
    name="dflash",
    options=frozenset(
        {"--draft-vocab-size", "--draft-intermediate-size", "--draft-layers", "--anchors", "heads", "kv_heads"}
    ),
    draft_config=draft_config,
    new_drafter=new_drafter,
    loss=loss,
    save=save_draft,
)
