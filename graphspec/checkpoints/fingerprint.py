"""One hash for everything a checkpoint is read from: what a build is keyed by."""

from __future__ import annotations

import hashlib

from graphspec.errors import CheckpointError

from .checkpoint import Checkpoint


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex) over the sorted (file name, SHA-256 of the content) of `checkpoint.files`; the folder
    they lie in does not matter. Reads every byte of the weights once. Raises CheckpointError for a file
    that cannot be read."""
    digests = []
    for path in checkpoint.files:
        try:
            with path.open("rb") as file:
                digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    together = hashlib.sha256()
    for name, digest in sorted(digests):
        # A NUL cannot be part of a file name, so no two lists of files give the same bytes.
        together.update(f"{name}\0{digest}\n".encode())
    return together.hexdigest()
