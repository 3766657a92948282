"""EAGLE-1 heads (arXiv 2401.15077), trained on their own outputs; EAGLE-2 runs the same ones as a tree."""

from __future__ import annotations

from graphspec.distill.method import Method

from .drafts import draft_config, new_drafter, save_draft
from .loss import loss

METHOD = Method(
    name="eagle",
    # No vocabulary of its own: the target's head reads what the head says.
    options=frozenset({"--draft-intermediate-size", "heads", "kv_heads"}),
    # A head runs on its own output: it is the same for any depth.
    draft_config=lambda target, shape, _vocabulary, _depth: draft_config(target, shape),
    new_drafter=new_drafter,
    loss=loss,
    save=save_draft,
)
