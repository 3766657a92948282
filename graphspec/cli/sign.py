"""`graphspec sign`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphspec.bundle import sign_bundle
from graphspec.signing import SIGNATURE, generate_key, load_private_key

from .errors import UsageError
from .progress import stages


def sign(
    *,
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE")] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="KEYFILE", help="An ed25519 private key, PEM or as ssh-keygen writes it."),
    ] = None,
    new_key: Annotated[
        Path | None,
        typer.Option("--generate-key", metavar="FILE", help="Make a key: FILE, and FILE.pub for servers."),
    ] = None,
) -> None:
    """Checks every file first: what is signed is what was built."""
    if new_key is not None and bundle is None and key is None:
        typer.echo(f"{new_key}: keep it secret; servers need {generate_key(new_key)}")
    elif bundle is not None and key is not None and new_key is None:
        private = load_private_key(key)
        with stages() as stage:
            sign_bundle(bundle, private, on_file=lambda file, size: stage(f"hashing {file} ({size / 1e6:.1f} MB)"))
        typer.echo(f"{bundle}: signed, {SIGNATURE} written")
    else:
        raise UsageError("give a BUNDLE and its --key KEYFILE, or --generate-key FILE alone to make one")
