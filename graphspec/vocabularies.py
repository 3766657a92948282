"""Whether two checkpoints mean the same by a token id, as far as their tokenizer.json say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError


def vocabulary_misfits(target: Checkpoint, draft: Checkpoint) -> list[str]:
    """Why a draft that proposes ids of its own vocabulary does not fit the target, in a sentence, or nothing.

    Ids that both name must be the same text. Special tokens are left out: releases of one family rename those that
    were reserved. What has no tokenizer.json is not compared. Raises CheckpointError for one that cannot be read.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    if ours is None or theirs is None:
        return []
    differing = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    if not differing:
        return []
    first = differing[0]
    return [
        f"its tokenizer gives {len(differing)} of {len(ours)} token ids another text, for example {first}: "
        f"{theirs[first]!r} for {ours[first]!r}, and its drafts are ids"
    ]


def _tokens(checkpoint: Checkpoint) -> dict[int, str] | None:
    """Text by id of every token that is not special; None without a tokenizer.json, or where it has no vocabulary."""
    content = checkpoint.tokenizer_files().get("tokenizer.json")
    if content is None:
        return None
    try:
        parsed = json.loads(content)
        tokens = _vocabulary(parsed["model"]["vocab"])
        added = {int(entry["id"]): entry for entry in parsed.get("added_tokens") or ()}
        tokens |= {token: str(entry["content"]) for token, entry in added.items()}
        special = {token for token, entry in added.items() if entry.get("special")}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"tokenizer.json of '{checkpoint.name}' is damaged: {type(error).__name__}: {error}"
        ) from error
    return {token: text for token, text in tokens.items() if token not in special} or None


def _vocabulary(vocabulary: Any) -> dict[int, str]:
    """A model's: id by token, or pairs of token and score in the order of ids (Unigram)."""
    if isinstance(vocabulary, Mapping):
        return {int(token): str(text) for text, token in vocabulary.items()}
    return {token: str(text) for token, (text, _) in enumerate(vocabulary)}
