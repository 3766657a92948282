"""A draft goes where nothing is, or another draft; nothing else is written over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from graphspec.distill.places import check_places, publish
from graphspec.errors import ConfigError


def files(folder: Path, **contents: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("_json", ".json").replace("_safetensors", ".safetensors")).write_text(text)
    return folder


def check(
    out: Path, *, work: Path | None = None, model: str = "some/model", draft: str | None = None, overwrite: bool = True
) -> None:
    check_places(out, work or out.with_name("work"), model=model, draft=draft, overwrite=overwrite)


def test_a_new_an_empty_and_a_replaced_folder_will_do(tmp_path: Path) -> None:
    check(tmp_path / "new", overwrite=False)
    check(files(tmp_path / "empty"), overwrite=False)
    check(files(tmp_path / "draft", distill_json="{}", config_json="{}"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_draft_is_made_from_is_not_written_over(tmp_path: Path, overwrite: bool) -> None:
    folder = files(tmp_path / "it", distill_json="{}", config_json="{}", model_safetensors="w")
    (tmp_path / "link").symlink_to(folder)
    for name in (folder, tmp_path / "link", Path(os.path.relpath(folder))):
        with pytest.raises(ConfigError, match="is the target itself"):
            check(folder, model=str(name), overwrite=overwrite)
        with pytest.raises(ConfigError, match="is the draft that is trained on"):
            check(folder, draft=str(name), overwrite=overwrite)


def test_what_is_no_draft_is_not_replaced(tmp_path: Path) -> None:
    other = files(tmp_path / "other", config_json="{}", model_safetensors="a language model's")
    with pytest.raises(ConfigError, match=r"it has no distill\.json"):
        check(other)
    with pytest.raises(ConfigError, match="or --overwrite"):
        check(other, overwrite=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder"):
        check(tmp_path / "file")


@pytest.mark.parametrize(("out", "work"), [("a", "a"), ("a", "a/work"), ("a/draft", "a"), ("b", "a/../b/c")])
def test_a_draft_and_its_work_lie_apart(tmp_path: Path, out: str, work: str) -> None:
    with pytest.raises(ConfigError, match="lie in each other"):
        check(tmp_path / out, work=tmp_path / work)


def test_of_a_draft_of_another_method_no_weights_are_left(tmp_path: Path) -> None:
    out = files(tmp_path / "out", distill_json="old", config_json="old", model_safetensors="old", README="mine")
    new = files(tmp_path / "new", distill_json="n", config_json="n", medusa_lm_head_safetensors="n")
    publish(new, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "README": "mine",
        "config.json": "n",
        "distill.json": "n",
        "medusa_lm_head.safetensors": "n",
    }


def test_what_is_cut_off_while_it_is_published_may_be_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    def copy(source: Path, to: Path) -> None:
        if copied:
            raise InterruptedError
        copied.append(source.name)
        to.write_bytes(source.read_bytes())

    monkeypatch.setattr(shutil, "copyfile", copy)
    new = files(tmp_path / "new", distill_json="n", config_json="n", model_safetensors="n")
    with pytest.raises(InterruptedError):
        publish(new, tmp_path / "out")
    check(tmp_path / "out")
