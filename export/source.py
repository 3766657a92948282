"""The code that a bundle comes from, as a part of its key: a changed one must not reuse the bundles of the old."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import graphspec
from graphspec import architectures, checkpoints
from graphspec.architecture import Architecture, Resolution
from graphspec.registry import ATTRIBUTE

_OWN = "graphspec"
_CODE = (".py", ".so", ".pyd")
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that do not belong together."""


def source_sha256(resolution: Resolution) -> str:
    """SHA-256 over our own code that reads, defines or compiles a model, and over the code of every other package
    and module that declares a part of the architecture or is imported there from beside it."""
    packages = (architectures, checkpoints)
    own = [Path(__file__).parent, *(Path(str(package.__file__)).parent for package in packages)]
    code = {f"{folder.name}/{name}": path for folder in own for name, path in _tree(folder)}
    core = Path(graphspec.__file__).parent
    code |= {f"{_OWN}/{path.name}": path for path in core.glob("*.py")}
    code |= dict(_beside(_roots(_modules(resolution))))
    together = hashlib.sha256()
    for name, path in sorted(code.items()):
        together.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return together.hexdigest()


def _modules(resolution: Resolution) -> Iterator[str]:
    """Where the architecture is declared, and where the functions of its parts are."""
    architecture = resolution.architecture
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _declares(module, architecture):
            yield name
    drafter, kinds = architecture.drafter, [architecture.target]
    if resolution.draft_kind is not None:
        kinds.append(resolution.draft_kind)
    functions: list[object] = [drafter.load, drafter.matches, drafter.misfits]
    for function in [*functions, *(part for kind in kinds for part in (kind.load, kind.matches))]:
        yield _module_of(function)


def _declares(module: ModuleType, architecture: Architecture) -> bool:
    declared = vars(module).get(ATTRIBUTE)
    items = declared if isinstance(declared, tuple | list) else (declared,)
    return any(item is architecture for item in items)


def _module_of(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if callable(function):
        function = inspect.unwrap(function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _roots(modules: Iterable[str]) -> list[Path]:
    """The outermost package of each, a folder, or else its file; ours are left out."""
    found = set[Path]()
    for name in modules:
        parts = name.split(".")
        if parts[0] == _OWN:
            continue
        for end in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:end]))
            file = getattr(module, "__file__", None)
            if file is None:  # a namespace is nobody's package; what is typed in has no file
                continue
            found.add(Path(file).parent if hasattr(module, "__path__") else Path(file))
            break
    return sorted(found)


def _beside(roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """The code of the roots and, where they are not installed, of modules beside them that they import."""
    seen, waiting = set(roots), list(roots)
    while waiting:
        root = waiting.pop()
        for name, path in _tree(root):
            yield f"{root.name}/{name}", path
            if root.parent.name in _INSTALLED or path.suffix != ".py":
                continue
            for imported in _imported(path):
                folder, file = root.parent / imported, root.parent / f"{imported}.py"
                near = folder if (folder / "__init__.py").is_file() else file
                if imported != _OWN and near not in seen and near.exists():
                    seen.add(near)
                    waiting.append(near)


def _tree(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file of code at or below a path, by its name there; links to folders are followed, once each."""
    if root.is_file():
        yield root.name, root
        return
    seen = set[str]()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for file in files:
            if file.endswith(_CODE):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path


def _imported(path: Path) -> Iterator[str]:
    """First parts of the absolute names that a file imports anywhere."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
