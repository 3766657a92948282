"""Every architecture there is: ours, those of installed packages, and those of modules named by the user.

Ours are found, not listed: each folder of graphspec.architectures with an `arch` module declares its own.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from graphspec.architecture import STEP_CAPABILITIES, Architecture, Facts, TargetKind
from graphspec.checkpoints import Checkpoint
from graphspec.detection import TARGET_FAMILIES, classify_target, describe
from graphspec.errors import ConfigError, ResolutionError

ENTRY_POINT_GROUP = "graphspec.architectures"
ATTRIBUTE = "ARCHITECTURES"


def registered(arch_modules: Sequence[str] = ()) -> tuple[Architecture, ...]:
    """Every declared architecture, ours first. `arch_modules` are the values of --arch-module.

    Raises ConfigError if a module of `arch_modules` does not exist, if a declaration is not one, or if two
    declare one name. An error inside a declaring module propagates as itself, with a note that names it.
    """
    if isinstance(arch_modules, str) or not all(isinstance(name, str) for name in arch_modules):
        raise ConfigError(f"the architecture modules are {arch_modules!r}: give a list of names of Python modules")
    found: dict[str, tuple[Architecture, str]] = {}
    for origin, architecture in _declared(arch_modules):
        # An installed package may be named on the command line too: the same declaration, found twice.
        known, known_origin = found.setdefault(architecture.name, (architecture, origin))
        if known is not architecture:
            raise ConfigError(
                f"architecture {architecture.name} is declared twice, in {known_origin} and in {origin}; "
                "give one of them another name"
            )
    return tuple(architecture for architecture, _ in found.values())


def find(name: str, architectures: Sequence[Architecture]) -> Architecture:
    """The architecture of that name. ResolutionError proposes the nearest name."""
    if not isinstance(name, str):
        raise ConfigError(f"the architecture is {name!r}: give its name, as text")
    by_name = {architecture.name: architecture for architecture in architectures}
    if name in by_name:
        return by_name[name]
    close = difflib.get_close_matches(name, by_name, n=1)
    hint = f"did you mean {close[0]}?" if close else f"registered: {', '.join(sorted(by_name)) or 'none'}"
    raise ResolutionError(f"no architecture is named {name!r}; {hint}")


def target_kind(checkpoint: Checkpoint, architectures: Sequence[Architecture] | None = None) -> TargetKind:
    """The one registered kind of target a checkpoint is. ResolutionError if there is none, or several."""
    facts = Facts(config=checkpoint.config, tensors=checkpoint.tensors)
    kinds = {a.target.name: a.target for a in (registered() if architectures is None else architectures)}
    fitting = [kind for kind in kinds.values() if kind.matches(facts)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(kind.name for kind in fitting or kinds.values()) or "none"
    said = f"'{checkpoint.name}' ({describe(facts)})"
    if fitting:
        raise ResolutionError(f"{said} is a target of several registered kinds: {names}")
    family = classify_target(facts)
    known = f"is recognised as {TARGET_FAMILIES[family].label}, which" if family else "is a target that"
    raise ResolutionError(f"{said} {known} no registered architecture serves; registered targets: {names}")


def _declared(arch_modules: Sequence[str]) -> Iterator[tuple[str, Architecture]]:
    for name in _own_modules():
        yield from _of_module(name)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        origin = f"entry point {entry.name} ({entry.value})"
        try:
            loaded = entry.load()
        except Exception as error:
            error.add_note(f"while loading the architectures of {origin}")
            raise
        yield from _checked(origin, getattr(loaded, ATTRIBUTE, loaded))
    for name in arch_modules:
        if not _exists(name):
            raise ConfigError(f"--arch-module {name}: there is no module of that name on the Python path")
        yield from _of_module(name)


def _own_modules() -> Iterator[str]:
    package = importlib.import_module("graphspec.architectures")
    for folder in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if folder.ispkg and importlib.util.find_spec(f"{folder.name}.arch"):
            yield f"{folder.name}.arch"


def _of_module(name: str) -> Iterator[tuple[str, Architecture]]:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        error.add_note(f"while importing the architecture declarations of {name}")
        raise
    if not hasattr(module, ATTRIBUTE):
        raise ConfigError(f"{name} declares no architectures: it has no {ATTRIBUTE}, a tuple of Architecture")
    yield from _checked(name, getattr(module, ATTRIBUTE))


def _checked(origin: str, declared: object) -> Iterator[tuple[str, Architecture]]:
    items = declared if isinstance(declared, tuple | list) else (declared,)
    for item in items:
        if not isinstance(item, Architecture):
            raise ConfigError(f"{origin} declares a {type(item).__name__}; {ATTRIBUTE} must be a tuple of Architecture")
        if claimed := sorted(item.capabilities - STEP_CAPABILITIES):
            # Its flags would be accepted and then change nothing.
            raise ConfigError(
                f"{origin} declares {item.name} with {', '.join(claimed)}, which the fused step does not do; it does: "
                f"{', '.join(sorted(STEP_CAPABILITIES))}"
            )
        yield origin, item


def _exists(module: str) -> bool:
    if not all(part.isidentifier() for part in module.split(".")):
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # A parent that is missing; a parent that fails on an import of its own is that module's error.
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return False
        raise
