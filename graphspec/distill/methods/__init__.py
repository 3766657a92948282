"""The methods whose drafts can be trained, each a package: METHOD is what training knows of it."""

from __future__ import annotations

from graphspec.distill.method import Method
from graphspec.errors import ConfigError

from . import dflash, eagle, eagle3, medusa

METHODS = {method.name: method for method in (eagle3.METHOD, dflash.METHOD, eagle.METHOD, medusa.METHOD)}


def find_method(name: str) -> Method:
    """The method of --method NAME. Raises ConfigError for one that is not known."""
    if name not in METHODS:
        raise ConfigError(f"--method {name!r} is not known; use {' or '.join(METHODS)}")
    return METHODS[name]
