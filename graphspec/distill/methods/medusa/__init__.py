"""Medusa heads (arXiv 2401.10774), trained as Medusa-1: the target stays as it is."""

from __future__ import annotations

from graphspec.distill.method import Method

from .drafts import draft_config, new_drafter, save_draft
from .loss import loss

METHOD = Method(
    name="medusa",
    options=frozenset({"--anchors"}),
    # What a head is made of, the target decides.
    draft_config=lambda target, _shape, _vocabulary, depth: draft_config(target, depth),
    new_drafter=new_drafter,
    loss=loss,
    save=save_draft,
)
