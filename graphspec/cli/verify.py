"""`graphspec verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphspec.bundle import verify_bundle

from .progress import stages


def verify(*, bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")]) -> None:
    """Hashes every file; everything that is wrong is named at once."""
    with stages() as stage:
        manifest = verify_bundle(bundle, on_file=lambda file, size: stage(f"hashing {file} ({size / 1e6:.1f} MB)"))
    typer.echo(f"{bundle}: {len(manifest.files)} files, all as they were written")
