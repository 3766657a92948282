"""`graphspec inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graphspec.bundle import read_manifest, rebuild_command
from graphspec.manifest import summary

from .flags import AsJson


def inspect(*, bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")], as_json: AsJson = False) -> None:
    """Reads the manifest only: `verify` checks the files."""
    manifest = read_manifest(bundle)
    if as_json:
        typer.echo(json.dumps(manifest.model_dump(mode="json"), indent=2))
        return
    # The manifest names the place it was built at; it may have been copied since.
    rows = [*summary(manifest), ("rebuild with", rebuild_command(manifest.build_command, bundle))]
    margin = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:{margin}}  {value}")
