"""What decides the conversations of a work directory: those of two plans would be a data set no command makes again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphspec.errors import ConfigError

from .conversations import FILES
from .files import whole_file
from .synthesis import Synthesis

_FILE = "plan.json"


def check_plan(folder: Path, plan: Synthesis, *, model: str, target: str, max_length: int) -> None:
    """Writes the plan to `folder`, or raises ConfigError if there are conversations of another one. `target` is its
    fingerprint."""
    values = {**asdict(plan), "messages": _hashed(plan.messages), "model": Path(model).name}
    values |= {"target": target, "max_length": max_length}
    del values["count"]  # more of the same are welcome
    path = folder / _FILE
    if not path.exists() or not any(folder.glob(FILES)):
        with whole_file(path) as partial:
            partial.write_text(json.dumps(values, indent=2) + "\n")
        return
    written = _read(path)
    # A plan of an earlier version says less.
    if other := sorted(name for name, value in values.items() if written.get(name, value) != value):
        raise ConfigError(
            f"{folder} holds conversations made in another way ({_FILE}: {', '.join(other)}); give another --work-dir"
        )


def _hashed(messages: tuple[str, ...]) -> str | None:
    return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest() if messages else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is damaged: how its conversations were made is not known; give another --work-dir")
    return values
