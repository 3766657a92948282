"""EAGLE-3 heads (arXiv 2503.01840), trained on their own outputs."""

from __future__ import annotations

from graphspec.distill.method import Method

from .drafts import draft_config, new_drafter, save_draft
from .loss import loss

METHOD = Method(
    name="eagle3",
    options=frozenset({"--draft-vocab-size", "--draft-intermediate-size", "heads", "kv_heads"}),
    # A head runs on its own output: it is the same for any depth.
    draft_config=lambda target, shape, vocabulary, _depth: draft_config(target, shape, vocabulary),
    new_drafter=new_drafter,
    loss=loss,
    save=save_draft,
)
