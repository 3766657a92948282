"""The folders at the top are the packages under graphspec.*, in a checkout and in the wheel."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("architectures", "export", "runtime")


def test_each_folder_is_linked_into_the_package() -> None:
    for folder in FOLDERS:
        link = ROOT / "graphspec" / folder
        assert link.is_symlink(), f"{link} is not a link: on Windows, clone with core.symlinks=true"
        assert link.samefile(ROOT / folder)


def test_every_package_is_in_the_wheel() -> None:
    inits = [init for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    present = {"graphspec." + ".".join(init.parent.relative_to(ROOT).parts) for init in inits}
    core = ROOT / "graphspec"
    for init in core.rglob("__init__.py"):
        inside = init.parent.relative_to(core).parts
        if not inside or inside[0] not in FOLDERS:
            present.add(".".join(("graphspec", *inside)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["packages"]) == present
