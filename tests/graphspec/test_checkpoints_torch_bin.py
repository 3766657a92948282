"""PyTorch .bin checkpoints."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError

TENSORS = {
    "half": torch.ones(2, 3, dtype=torch.float16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "brain": torch.ones(2, dtype=torch.bfloat16),
    "index": torch.arange(3),
    "mask": torch.tensor([True, False]),
    "tiny": torch.ones(2).to(torch.float8_e4m3fn),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("zipped", [True, False])
def test_a_single_file_is_read(folder: Path, zipped: bool) -> None:
    # The format of before torch 1.6 has no 8-bit floats.
    tensors = {name: tensor for name, tensor in TENSORS.items() if zipped or name != "tiny"}
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(folder)
    described = {
        "half": ((2, 3), "F16"),
        "transposed": ((3, 2), "F32"),
        "brain": ((2,), "BF16"),
        "index": ((3,), "I64"),
        "mask": ((2,), "BOOL"),
        "tiny": ((2,), "F8_E4M3"),
    }
    assert {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()} == {
        name: described[name] for name in tensors
    }
    for name, tensor in checkpoint.load(tensors):
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


def test_parameters_are_tensors(folder: Path) -> None:
    torch.save({"w": torch.nn.Parameter(torch.ones(2))}, folder / "pytorch_model.bin")
    ((_, tensor),) = open_checkpoint(folder).load(["w"])
    assert not tensor.requires_grad


def test_shards_are_read_as_one(folder: Path) -> None:
    weight_map = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(TENSORS)}
    for file in set(weight_map.values()):
        torch.save({name: TENSORS[name] for name in TENSORS if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = dict(open_checkpoint(folder).load(TENSORS))
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_changing_a_loaded_tensor_does_not_touch_the_file(folder: Path) -> None:
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    before = (folder / "pytorch_model.bin").read_bytes()
    ((_, tensor),) = open_checkpoint(folder).load(["w"])
    tensor.zero_()
    assert (folder / "pytorch_model.bin").read_bytes() == before


class Shell:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(folder: Path, zipped: bool) -> None:
    marker = folder / "ran"
    torch.save({"w": Shell(marker)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged or holds Python objects") as caught:
        open_checkpoint(folder)
    assert not marker.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "saved",
    [
        {"model": {"w": torch.ones(2)}},
        {"w": torch.ones(2), "step": 3},
        {1: torch.ones(2)},
        {"w": torch.ones(2).to_sparse()},
    ],
)
def test_anything_but_dense_tensors_by_name_is_refused(folder: Path, saved: object) -> None:
    torch.save(saved, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a flat dictionary of dense tensors"):
        open_checkpoint(folder)


def test_a_bare_tensor_is_refused(folder: Path) -> None:
    torch.save(torch.ones(2), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a Tensor, not a dictionary"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 1, 100, 600, -1])
def test_a_truncated_file_is_refused_by_name(folder: Path, keep: int) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    content = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"<html>", pickle.dumps([1]), b"PK\x03\x04" + b"\0" * 40])
def test_something_else_is_refused_by_name(folder: Path, content: bytes) -> None:
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(folder)
