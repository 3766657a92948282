"""Features in bfloat16 are nearly those in float32, and are kept apart from them."""

from __future__ import annotations

from pathlib import Path

import torch

from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.conversations import Conversation
from graphspec.distill.features import FeatureStore

TAPS = (1, 3)


def test_products_in_bfloat16_change_features_a_little(
    chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    stores = [FeatureStore(tmp_path, open_checkpoint(chatty), TAPS, precision) for precision in ("float32", "bfloat16")]
    for store in stores:
        store.compute(target, conversations[:2], lambda _: None)
    exact, rounded = (store.load(conversations[0]) for store in stores)
    assert torch.equal(exact.tokens, rounded.tokens)
    for one, other in ((exact.taps, rounded.taps), (exact.final, rounded.final)):
        difference = (one.float() - other.float()).abs().mean() / one.float().abs().mean()
        assert 0 < difference < 0.03
