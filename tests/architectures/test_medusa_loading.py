"""What a file of Medusa heads must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_medusa
import torch
from torch import Tensor
from twins import Twin

from graphspec.architectures.drafters.medusa import MedusaDrafter
from graphspec.architectures.drafters.medusa_loading import load_drafter
from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError, ConfigError
from graphspec.speculative_config import SpeculativeConfig


def load(twin: Twin, path: Path, tensors: dict[str, Tensor], count: int = 3) -> MedusaDrafter:
    draft = open_checkpoint(tiny_medusa.save_medusa(path, tensors))
    return load_drafter(twin.target, draft, count, SpeculativeConfig())


def test_more_tokens_than_heads_are_refused(small: Twin, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 Medusa heads, and 4 tokens need as many"):
        load(small, tmp_path, tiny_medusa.medusa_tensors(), 4)


def test_its_problems_are_named_together(small: Twin, tmp_path: Path) -> None:
    tensors = tiny_medusa.medusa_tensors()
    del tensors["1.0.linear.bias"], tensors["2.1.weight"]
    tensors["0.1.weight"] = torch.zeros(100, 64)
    tensors["4.0.linear.weight"] = torch.zeros(64, 64)  # there is no head 3
    tensors["0.1.bias"] = torch.zeros(128)
    with pytest.raises(CheckpointError) as error:
        load(small, tmp_path, tensors)
    message = str(error.value)
    assert "2 missing: 1.0.linear.bias, 2.1.weight" in message
    assert "2 unexpected: 0.1.bias, 4.0.linear.weight" in message
    assert "0.1.weight (found [100, 64], expected [128, 64])" in message


def test_a_block_that_is_missing_among_others_is_not_made_up(small: Twin, tmp_path: Path) -> None:
    tensors = tiny_medusa.medusa_tensors(blocks=3)
    del tensors["1.1.linear.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing: 1\.1\.linear\.weight"):
        load(small, tmp_path, tensors)


def test_heads_that_are_not_used_are_no_reason_to_refuse(small: Twin, tmp_path: Path) -> None:
    tensors = tiny_medusa.medusa_tensors(heads=3)
    tensors["2.1.weight"] = torch.zeros(1, 1)
    assert load(small, tmp_path, tensors, 2).first.weight.shape == (128, 64)
