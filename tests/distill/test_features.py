"""Features are kept apart by precision, and shared where one method reads what another has left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.distill.batch import collate
from graphspec.distill.conversations import Conversation
from graphspec.distill.features import FeatureStore, target_pass

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


def test_features_without_taps_are_those_that_another_method_left(
    chatty: Path, target: DecoderTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    opened, done = open_checkpoint(chatty), list[int]()
    tapped = FeatureStore(tmp_path, opened, TAPS)
    tapped.compute(target, conversations[:2], lambda _: None)
    plain = FeatureStore(tmp_path, opened, (), others=TAPS)
    plain.compute(target, conversations[:3], done.append)
    assert done == [2, 1]  # two are there, one is added
    for conversation in conversations[:2]:
        found = plain.load(conversation)
        assert torch.equal(found.final, tapped.load(conversation).final)
        assert found.taps.shape == (len(conversation.tokens), 0)
    # What was added holds nothing for one that reads taps.
    tapped.compute(target, conversations[:3], done.append)
    assert done[2:] == [2, 1]
    torch.testing.assert_close(plain.load(conversations[2]).final, tapped.load(conversations[2]).final)
    assert not torch.equal(plain.load(conversations[2]).final, plain.load(conversations[1]).final)


def test_states_too_large_for_float16_are_kept(
    target: DecoderTarget, conversations: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some targets have a few enormous values, mostly at the first token."""
    embed = target.embed
    scale = torch.ones(64)
    scale[3] = 1e6
    monkeypatch.setattr(target, "embed", lambda tokens: embed(tokens) * scale)
    (large,) = target_pass(target, conversations[:1], TAPS)
    monkeypatch.undo()
    (small,) = target_pass(target, conversations[1:2], TAPS)
    assert (large.taps.dtype, large.final.dtype, small.taps.dtype) == (torch.float32, torch.float16, torch.float16)
    assert large.taps.isfinite().all()
    for features in ((small, large), (large, small)):
        asked = [conversations[0] if each is large else conversations[1] for each in features]
        batch = collate(asked, features)
        row = [each is large for each in features].index(True)
        assert torch.equal(batch.taps[row, : len(large.tokens)], large.taps)
