"""`graphspec verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphspec.bundle import verify_bundle
from graphspec.signing import load_signer

from .flags import RequireSignature
from .progress import stages


def verify(
    *, bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")], require_signature: RequireSignature = None
) -> None:
    """Hashes every file; everything that is wrong is named at once."""
    signer = None if require_signature is None else load_signer(require_signature)
    with stages() as stage:
        manifest = verify_bundle(
            bundle, signer=signer, on_file=lambda file, size: stage(f"hashing {file} ({size / 1e6:.1f} MB)")
        )
    signed = "" if signer is None else f", signed by the key of {signer.file}"
    typer.echo(f"{bundle}: {len(manifest.files)} files, all as they were written{signed}")
