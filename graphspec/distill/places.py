"""Where a draft goes: nothing that is not a draft is written over, and what is there stays until a new one is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from graphspec.checkpoints import local_path
from graphspec.errors import ConfigError

from .drafts import CONFIG_FILE, WEIGHTS_FILES
from .files import whole_file

RECORD = "distill.json"
"""What was done, and the mark of a draft that was made here."""


def check_places(out: Path, work: Path, *, model: str, draft: str | None, overwrite: bool) -> None:
    """Raises ConfigError where a draft cannot be put at `out`, or where that would take away what it is made from."""
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"{out} is not a folder; give another -o")
    if _same(out, model):
        raise ConfigError(f"{out} is the target itself; give another -o")
    if draft is not None and _same(out, draft):
        raise ConfigError(
            f"{out} is the draft that is trained on, which the same command could not go on from when it is replaced; "
            "give another -o"
        )
    inner, outer = Path(os.path.realpath(out)), Path(os.path.realpath(work))
    if inner == outer or inner in outer.parents or outer in inner.parents:
        raise ConfigError(f"{out} and the work directory {work} lie in each other; give another -o or --work-dir")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} is not empty; give another -o, or --overwrite to replace the draft there")
    if not (out / RECORD).is_file():
        raise ConfigError(
            f"{out} is not empty and no draft that was made here (it has no {RECORD}), and --overwrite replaces "
            "nothing else; give another -o, or move it away"
        )


def publish(draft: Path, out: Path) -> None:
    """Copies a whole draft to `out`: its files take the places of an older one's, whose other weights are removed."""
    # The record first: what is cut off here is known as a draft, and may be written over.
    names = [RECORD, *(name for name in WEIGHTS_FILES if (draft / name).exists()), CONFIG_FILE]
    for name in names:
        with whole_file(out / name) as partial:
            shutil.copyfile(draft / name, partial)
    for name in {*WEIGHTS_FILES} - {*names}:
        (out / name).unlink(missing_ok=True)


def _same(out: Path, checkpoint: str) -> bool:
    named = local_path(checkpoint)
    return out.exists() and os.path.exists(named) and os.path.samefile(out, named)
