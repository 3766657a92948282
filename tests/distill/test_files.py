"""Files are whole or not there, and a full disk is told as one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from graphspec.distill.files import whole_file
from graphspec.errors import BuildError
from graphspec.staging import is_full


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with whole_file(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert os.listdir(path.parent) == ["file"]


def test_who_may_read_other_files_may_read_it(tmp_path: Path) -> None:
    """The writer of safetensors keeps what it writes to its owner."""
    (tmp_path / "other").write_text("")
    with whole_file(tmp_path / "file") as partial:
        partial.touch(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_that_does_not_end_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with whole_file(path) as partial:
            partial.write_text("ne")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "x"), RuntimeError("I/O error: No space left on device (os error 28)")]
)
def test_a_full_disk_is_told(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(BuildError, match=r"^disk full: .*file cannot be written"), whole_file(tmp_path / "file"):
        raise error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_torch_tells_a_full_disk_when_it_is_given_a_file() -> None:
    """What training.py relies on."""
    with pytest.raises((RuntimeError, OSError)) as caught, open("/dev/full", "wb") as file:
        torch.save({"x": torch.zeros(100_000)}, file)
    assert is_full(caught.value)
