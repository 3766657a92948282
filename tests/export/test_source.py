"""A bundle is reused only if the code that made it is still the same."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import tiny

from graphspec import architectures, checkpoints, detection
from graphspec.architecture import Resolution
from graphspec.building import resolve_pair
from graphspec.export import build as build_module
from graphspec.export import source
from graphspec.export.source import source_sha256

ARCH = """
from functools import partial

from graphspec.architecture import Architecture, DrafterKind, TargetKind
from graphspec.architectures.llama3.arch import TARGET

def _load(target, draft, k, config, scale=1):
    from {drafter} import Drafter
    return Drafter(k)

MINE = DrafterKind(name="mine", label="Mine", methods=("dspark",), draft_checkpoint=False,
    matches=lambda target, draft: False, default_num_speculative_tokens=2, load=partial(_load, scale=2))
ARCHITECTURES = (Architecture(target=TARGET, drafter=MINE),)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llama(tmp_path_factory.mktemp("source") / "target", layers=1)


def changed_by(path: Path, resolution: Resolution) -> bool:
    """Whether a changed file changes the hash, and the old content brings it back."""
    before, content = source_sha256(resolution), path.read_bytes()
    path.write_bytes(content + b"# changed\n")
    after = source_sha256(resolution)
    path.write_bytes(content)
    assert source_sha256(resolution) == before
    return after != before


def test_a_plug_in_of_single_files_counts_with_what_it_imports_from_beside_it(folder: Path, target: Path) -> None:
    (folder / "mine.py").write_text(ARCH.format(drafter="mine_drafter"))
    (folder / "mine_drafter.py").write_text("import mine_blocks.layers\nfrom torch import nn\n")
    (folder / "mine_blocks").mkdir()
    (folder / "mine_blocks" / "__init__.py").write_text("")
    (folder / "mine_blocks" / "layers.py").write_text("import mine\n")  # in a circle
    (folder / "other.py").write_text("")
    resolution = resolve_pair(target, method="dspark", arch_modules=["mine"])
    for name in ("mine.py", "mine_drafter.py", "mine_blocks/__init__.py", "mine_blocks/layers.py"):
        assert changed_by(folder / name, resolution), name
    assert not changed_by(folder / "other.py", resolution)


def test_a_plug_in_package_counts_whole(folder: Path, target: Path) -> None:
    (folder / "villa" / "arch").mkdir(parents=True)
    for name in ("__init__.py", "arch/__init__.py", "unused.py"):
        (folder / "villa" / name).write_text("")
    (folder / "villa" / "arch" / "mine.py").write_text(ARCH.format(drafter="villa.drafter"))
    (folder / "villa" / "drafter.py").write_text("Drafter = None\n")
    resolution = resolve_pair(target, method="dspark", arch_modules=["villa.arch.mine"])
    for name in ("__init__.py", "arch/mine.py", "drafter.py", "unused.py"):
        assert changed_by(folder / "villa" / name, resolution), name


def test_an_installed_plug_in_counts_and_its_neighbours_do_not(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    (packages / "installed_arch.py").write_text("import huge\n" + ARCH.format(drafter="huge"))
    (packages / "huge.py").write_text("")
    resolution = resolve_pair(target, method="dspark", arch_modules=["installed_arch"])
    assert changed_by(packages / "installed_arch.py", resolution)
    assert not changed_by(packages / "huge.py", resolution)
    for name in ("installed_arch", "huge"):
        del sys.modules[name]


def test_a_copy_of_a_plug_in_elsewhere_is_the_same_code(folder: Path, target: Path) -> None:
    def digest(place: Path) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(place))
            sys.modules.pop("mine", None)
            return source_sha256(resolve_pair(target, method="dspark", arch_modules=["mine"]))

    first = folder / "a"
    first.mkdir()
    (first / "mine.py").write_text(ARCH.format(drafter="nowhere"))
    shutil.copytree(first, folder / "b")
    assert digest(first) == digest(folder / "b")


@pytest.mark.parametrize("module", [detection, checkpoints, architectures, build_module], ids=lambda m: m.__name__)
def test_our_own_code_counts(module: object, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it that reads, defines or compiles a model: shown on a copy."""
    resolution = resolve_pair(target, method="ngram")
    file = Path(str(module.__file__)).resolve()  # type: ignore[attr-defined]
    copy = Path(shutil.copytree(file.parent, tmp_path / file.parent.name, symlinks=True))
    owner = {detection: "graphspec", checkpoints: "checkpoints", architectures: "architectures"}.get(module)  # type: ignore[call-overload]
    if owner is None:
        monkeypatch.setattr(source, "__file__", str(copy / "source.py"))
    else:
        stand_in = type(sys)(owner)
        stand_in.__file__ = str(copy / "__init__.py")
        monkeypatch.setattr(source, owner, stand_in)
    assert changed_by(copy / file.name, resolution)
