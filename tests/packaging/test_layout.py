"""The folders at the top are the packages under graphspec.*, in a checkout and in the wheel."""

import tomllib
from pathlib import Path
from typing import Any

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
    assert set(setuptools_settings()["packages"]) == present


def test_every_file_that_is_no_module_is_in_the_wheel() -> None:
    settings = setuptools_settings()
    folders = {name: ROOT / folder for name, folder in settings["package-dir"].items()}
    for package in settings["packages"]:
        root = max((name for name in folders if f"{package}.".startswith(f"{name}.")), key=len)
        folder = folders[root].joinpath(*package.removeprefix(root).split("."))
        data = {path.name for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert data == set(settings["package-data"].get(package, ())), package


def setuptools_settings() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return settings
