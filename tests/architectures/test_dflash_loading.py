"""What a DFlash checkpoint may not ask for, and what its files may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_dflash
import torch
from torch import Tensor
from twins import Twin

from graphspec.architectures.drafters.dflash import DFlashDrafter
from graphspec.architectures.drafters.dflash_loading import load_drafter
from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig

BLOCK = {"mask_token_id": tiny_dflash.MASK, "target_layer_ids": [1, 5]}


def load(twin: Twin, path: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> DFlashDrafter:
    draft = tiny_dflash.save_dflash(path, tensors, **config)
    return load_drafter(twin.target, open_checkpoint(draft), 3, SpeculativeConfig())


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"dflash_config": {**BLOCK, "causal": True}}, "causal: true"),
        ({"dflash_config": {**BLOCK, "use_swa": True, "attention_sink_bias": True}}, "use_swa: true, attention_sink"),
        ({"dflash_config": {**BLOCK, "attention_value_scale": 0.5}}, "attention_value_scale: 0.5"),
        ({"sample_from_anchor": True}, "sample_from_anchor: true"),
        ({"is_neox_style": False}, "is_neox_style: false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "config.json asks for sliding_attention"),
    ],
)
def test_another_kind_of_block_is_refused(llama: Twin, tmp_path: Path, config: dict[str, Any], asked: str) -> None:
    with pytest.raises(UnsupportedError, match=asked):
        load(llama, tmp_path, **config)


def test_neutral_switches_are_no_reason_to_refuse(llama: Twin, tmp_path: Path) -> None:
    block = {**BLOCK, "causal": False, "use_swa": False, "attention_value_scale": 1.0}
    load(llama, tmp_path, dflash_config=block, layer_types=["full_attention"] * 2, sliding_window=None)


def test_a_mask_embedding_in_a_file_of_its_own_is_not_passed_over(llama: Twin, tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"mask_embedding\.pt"):
        load(llama, tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "mask_token_id is None"),
        ({"dflash_config": {**BLOCK, "mask_token_id": 128}}, "a token of the target: 0 to 127"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [5, 1]}}, "must be in ascending order"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [1, 9]}}, r"enters layers \[10\] \(target_layer_ids\)"),
        ({"dflash_config": {**BLOCK, "target_layer_ids": [1]}}, "reads 1 hidden states of size 64"),
    ],
)
def test_what_a_block_reads_must_be_there(llama: Twin, tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        load(llama, tmp_path, **config)


def test_its_problems_are_named_together(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny_dflash.dflash_tensors()
    del tensors["hidden_norm.weight"], tensors["layers.1.self_attn.k_norm.weight"]
    tensors["layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 32)
    tensors["embed_proj.0.weight"] = torch.zeros(64)
    with pytest.raises(CheckpointError) as error:
        load(llama, tmp_path, tensors)
    message = str(error.value)
    assert "2 missing: hidden_norm.weight, layers.1.self_attn.k_norm.weight" in message
    assert "1 unexpected: embed_proj.0.weight" in message
    assert "layers.0.self_attn.q_proj.weight (found [64, 32], expected [64, 64])" in message


def test_a_d2t_past_the_targets_vocabulary_is_refused(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny_dflash.dflash_tensors(pruned=True)
    tensors["d2t"][-1] = 127
    with pytest.raises(CheckpointError, match="d2t points at token 158"):
        load(llama, tmp_path, tensors, draft_vocab_size=32)
