"""Values of a raw config.json, checked as they are read: a wrong one is a CheckpointError that names its field.

A field that is null counts as missing where a default is given.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

from graphspec.errors import CheckpointError

Default = TypeVar("Default", int, float, None)
Config = Mapping[str, Any]


def size(config: Config, key: str) -> int:
    """A whole number above 0 that must be there."""
    if key not in config:
        raise CheckpointError(f"config.json has no {key}, and this kind of model needs it as a whole number above 0")
    return _whole(config, key)


def size_or(config: Config, key: str, default: Default) -> int | Default:
    """A whole number above 0, or the default."""
    return default if config.get(key) is None else _whole(config, key)


def number_or(
    config: Config, key: str, default: Default, *, above: float = 0, nullable: bool = True
) -> float | Default:
    """A finite number above a bound, or the default: where the field is missing or, if `nullable`, null."""
    value = config.get(key)
    if key not in config or (value is None and nullable):
        return default
    if not _is_number(value) or not above < value < math.inf:
        wanted = "a number" if above == -math.inf else f"a number above {above:g}"
        raise wrong(key, value, wanted)
    return float(value)


def number(config: Config, key: str, *, above: float = 0) -> float:
    """A finite number above a bound that must be there."""
    if config.get(key) is None:
        raise wrong(key, config.get(key), f"a number above {above:g}")
    return float(number_or(config, key, 0.0, above=above))


def switch(config: Config, key: str, default: bool = False) -> bool:
    """True or false, or the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return value


def section(config: Config, key: str) -> Config:
    """An object inside the config; empty if it is missing or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(key, value, "an object")
    return value


def strings(config: Config, key: str) -> list[str]:
    """A list of texts; empty if it is missing or null."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise wrong(key, value, "a list of texts")
    return list(value)


def whole_numbers(config: Config, key: str) -> list[int]:
    """A list of whole numbers, negative ones too; empty if it is missing or null."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(_is_whole(item) for item in value):
        raise wrong(key, value, "a list of whole numbers")
    return list(value)


def wrong(key: str, value: object, wanted: str) -> CheckpointError:
    """The error for a field whose value is not what it must be."""
    try:
        shown = reprlib.repr(value) if isinstance(value, float | str) else json.dumps(value)
    except (TypeError, ValueError):
        shown = reprlib.repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return CheckpointError(f"config.json says {key} is {shown}, and this kind of model needs it as {wanted}")


def _whole(config: Config, key: str) -> int:
    value = config[key]
    if not _is_whole(value) or value < 1:
        raise wrong(key, value, "a whole number above 0")
    return int(value)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
