"""The methods whose drafts can be trained, each a package: METHOD is what training knows of it."""

from __future__ import annotations

from graphspec.distill.method import Method
from graphspec.errors import ConfigError, UnsupportedError

from . import dflash, eagle, eagle3

METHODS = {method.name: method for method in (eagle3.METHOD, dflash.METHOD, eagle.METHOD)}
PLANNED = ("medusa",)


def find_method(name: str) -> Method:
    """The method of --method NAME. Raises ConfigError for one that is not known, UnsupportedError for one that is
    planned."""
    if name in METHODS:
        return METHODS[name]
    known = " or ".join(METHODS)
    if name in PLANNED:
        raise UnsupportedError(f"drafts for '{name}' cannot be trained in this version; use {known}")
    raise ConfigError(f"--method {name!r} is not known; use {known}")
