"""A Hugging Face directory: config.json, indexes and shards, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(4).to(torch.bfloat16),
    "c": torch.tensor([True, False]),
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": TENSORS["a"], "c": TENSORS["c"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": 1, "c": 1, "b": 2})
    return tmp_path


def write_index(folder: Path, shards: dict[str, int]) -> None:
    weight_map = {name: f"model-0000{shard}-of-00002.safetensors" for name, shard in shards.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_as_one_in_the_order_asked_for(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "BF16"),
        "c": ((2,), "BOOL"),
    }
    loaded = list(checkpoint.load(["b", "a", "c", "b"]))
    assert [name for name, _ in loaded] == ["b", "a", "c", "b"]
    assert all(torch.equal(tensor, TENSORS[name]) and tensor.dtype == TENSORS[name].dtype for name, tensor in loaded)


def test_a_build_is_keyed_by_config_index_shards_and_tokenizer(sharded: Path) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / "README.md").write_text("not read")
    assert [path.name for path in open_checkpoint(sharded).files] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_tensor_the_index_forgot_is_there_all_the_same(sharded: Path) -> None:
    write_index(sharded, {"a": 1, "b": 2})
    assert set(open_checkpoint(sharded).tensors) == {"a", "b", "c"}


def test_the_index_decides_where_a_tensor_of_two_shards_is_read(sharded: Path) -> None:
    save_file({"b": TENSORS["b"], "a": torch.zeros(9)}, sharded / "model-00002-of-00002.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.tensors["a"].shape == (2, 3)
    assert torch.equal(dict(checkpoint.load(["a"]))["a"], TENSORS["a"])


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 files that are not there: model-00002-of-00002\.safetensors"):
        open_checkpoint(sharded)


def test_a_tensor_its_shard_lacks_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": 1, "c": 2, "b": 2})
    with pytest.raises(CheckpointError, match=r"tensors that their file lacks: c \(model-00002-of-00002\.safe"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", "a/b.safetensors", 3, None, ".."])
def test_an_index_cannot_point_out_of_its_directory(sharded: Path, file: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[1]", "{"])
def test_an_index_without_a_weight_map_is_refused(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"", "config.json is not valid JSON"),
        (b"\xff\xfe\x00", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON"),
        (b"[1]", "config.json must hold a JSON object, not a list"),
        (b"null", "config.json must hold a JSON object, not null"),
        (b"3", "config.json must hold a JSON object, not a number"),
        (b"true", "config.json must hold a JSON object, not a boolean"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(sharded: Path, content: bytes, message: str) -> None:
    (sharded / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(sharded)


def test_weights_without_a_config_say_what_was_found(sharded: Path) -> None:
    (sharded / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"not a checkpoint: found model-00001-of-.*expected config\.json"):
        open_checkpoint(sharded)


def test_a_config_without_weights_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(CheckpointError, match=r"not a checkpoint: found config\.json, training_args\.bin; expected"):
        open_checkpoint(tmp_path)


def test_the_only_safetensors_file_counts_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "medusa_lm_head.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(TENSORS)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("x", "y"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 2 safetensors files \(x\.safetensors, y\.safetensors\)"):
        open_checkpoint(tmp_path)


def test_safetensors_come_before_bin(sharded: Path) -> None:
    (sharded / "pytorch_model.bin").write_bytes(b"not read")
    assert set(open_checkpoint(sharded).tensors) == {"a", "b", "c"}


def test_tokenizer_files_are_handed_out_byte_for_byte(sharded: Path) -> None:
    contents = {
        "tokenizer.json": b'{"any": "thing"}',
        "tokenizer_config.json": b'{ "bos_token": "<s>" }',
        "special_tokens_map.json": b"{}",
        "generation_config.json": b'{"eos_token_id": [1, 2]}\n',
        "chat_template.jinja": b"{{ messages }}",
    }
    for name, content in contents.items():
        (sharded / name).write_bytes(content)
    assert open_checkpoint(sharded).tokenizer_files() == contents


def test_a_directory_without_a_tokenizer_has_no_entries(sharded: Path) -> None:
    assert open_checkpoint(sharded).tokenizer_files() == {}


@pytest.mark.parametrize(
    "template",
    ["Hé {{ x }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "Hé {{ x }}"}]],
)
def test_a_chat_template_inside_the_settings_becomes_a_file(sharded: Path, template: object) -> None:
    (sharded / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert open_checkpoint(sharded).tokenizer_files()["chat_template.jinja"].decode() == "Hé {{ x }}"


def test_a_chat_template_file_comes_before_the_settings(sharded: Path) -> None:
    (sharded / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (sharded / "chat_template.jinja").write_text("new")
    assert open_checkpoint(sharded).tokenizer_files()["chat_template.jinja"] == b"new"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_damaged_tokenizer_settings_are_named(sharded: Path, name: str) -> None:
    (sharded / name).write_text("{")
    with pytest.raises(CheckpointError, match=f"{name} is not valid JSON"):
        open_checkpoint(sharded).tokenizer_files()
