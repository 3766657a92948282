"""What open_checkpoint makes of a path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    return folder


def test_a_directory_opens_by_string_and_by_path(directory: Path) -> None:
    for model in (str(directory), directory):
        checkpoint = open_checkpoint(model)
        assert checkpoint.name == str(directory)
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.tensors["a"].shape == (2, 3)


def test_a_relative_directory_without_a_dot_is_a_path(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert list(open_checkpoint("model").tensors) == ["a"]


def test_a_tilde_stands_for_the_home_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert list(open_checkpoint("~/model").tensors) == ["a"]


@pytest.mark.parametrize(
    "name", ["./nothing", "../nothing", "/nothing/here", "~/nothing", "a/b/c", "org/name/", "org/name.gguf", "x.GGUF"]
)
def test_a_name_that_looks_like_a_path_is_never_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory: "):
        open_checkpoint(name)


def test_a_path_object_is_never_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory: org/name"):
        open_checkpoint(Path("org/name"))


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no model was named"):
        open_checkpoint("")


def test_a_name_no_file_system_takes_is_no_traceback() -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint("./" + "x" * 5000)
    with pytest.raises(CheckpointError):
        open_checkpoint("./a\0b")


def test_a_weight_file_is_refused_with_the_directory_as_advice(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a file, but not a \.gguf: pass the directory"):
        open_checkpoint(directory / "model.safetensors")


def test_a_revision_of_a_local_path_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="only a hub id has a revision"):
        open_checkpoint(directory, revision="main")


def test_a_directory_of_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.Q4_0.gguf", "b.Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files \(a\.Q4_0\.gguf, b\.Q8_0\.gguf\)"):
        open_checkpoint(tmp_path)


def test_other_weights_come_before_a_gguf_beside_them(directory: Path) -> None:
    (directory / "copy.gguf").touch()
    assert list(open_checkpoint(directory).tensors) == ["a"]


def test_an_empty_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the directory is empty; expected config\.json with") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
