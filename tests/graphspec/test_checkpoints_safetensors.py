"""Safetensors headers: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from graphspec.checkpoints import open_checkpoint
from graphspec.checkpoints.safetensors_file import read_infos
from graphspec.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def write(path: Path, header: Any, data: bytes) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_is_described_as_the_library_describes_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES}, path, metadata={"format": "pt"})
    infos = read_infos(path)
    with safe_open(path, framework="pt") as file:
        assert set(infos) == set(file.keys())
        assert {name: (list(info.shape), info.dtype) for name, info in infos.items()} == {
            name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in infos
        }


def test_every_dtype_loads_as_it_is_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, tensor in open_checkpoint(tmp_path).load(tensors):
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    save_file({"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    infos = read_infos(tmp_path / "x.safetensors")
    assert (infos["scalar"].shape, infos["empty"].shape) == ((), (0, 4))


@pytest.mark.parametrize("content", [b"", b"1234567", b"<html>not found</html>", b"\xff" * 40])
def test_something_else_is_not_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is not a safetensors file"):
        read_infos(path)


def test_a_file_cut_inside_its_header_is_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry("F32", [2], 0, 8)}, b"")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"x\.safetensors is truncated: its header takes"):
        read_infos(path)


def test_a_file_cut_inside_its_data_is_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry("F32", [2], 0, 8)}, b"1234567")
    with pytest.raises(CheckpointError, match="describes 8 bytes of data and the file has 7; download it again"):
        read_infos(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff{}",
        b"[]",
        {"a": 3},
        {"a": {}},
        {"a": entry("F32", [2], 0, 7)},
        {"a": entry("F32", [2], 8, 0)},
        {"a": entry("F32", [-2], 0, 8)},
        {"a": entry("F32", [True, 2], 0, 8)},
        {"a": {"dtype": 3, "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}},
        {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4), "c": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [1], 0, 4)},
    ],
)
def test_a_damaged_header_is_refused_by_file_name(tmp_path: Path, header: Any) -> None:
    path = write(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_infos(path)


def test_a_dtype_the_library_does_not_know_fails_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": entry("F99", [2], 0, 8)}, b"\0" * 8)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["a"].dtype == "F99"
    with pytest.raises(CheckpointError, match=r"cannot read tensor a of .*model\.safetensors"):
        list(checkpoint.load(["a"]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_never_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert all(len(info.shape) >= 0 for info in read_infos(path).values())
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017 — not raising is fine too
