"""A build finds a sound bundle, and makes a damaged one again."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

import graphspec
from graphspec.bundle import verify_bundle
from graphspec.errors import CheckpointError


@pytest.mark.slow
def test_a_damaged_bundle_is_built_again(tmp_path: Path) -> None:
    model = tiny.save_llama(tmp_path / "model", layers=1)
    bundle = tmp_path / "bundle"

    def was_cached() -> bool:
        return graphspec.build(model=model, out=bundle, max_length=32, widths=[0]).was_cached

    assert not was_cached()
    assert was_cached()
    weights = tmp_path / "bundle" / "weights" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert not was_cached()
    verify_bundle(bundle)


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = tiny.save_llama(tmp_path / "model", layers=1)
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        graphspec.build(model=model, out=tmp_path / "bundle", max_length=32)
    assert not (tmp_path / "bundle").exists()
