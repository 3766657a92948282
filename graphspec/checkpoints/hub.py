"""Checkpoints on the Hugging Face hub, downloaded into its local cache."""

from __future__ import annotations

import errno
from pathlib import Path

from graphspec.errors import CheckpointError

from .directory import MEDUSA_FILE, TOKENIZER_FILES, open_directory
from .stored import StoredCheckpoint

_COMMON = ("config.json", *TOKENIZER_FILES)
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_BIN = ("pytorch_model*.bin", "pytorch_model.bin.index.json", MEDUSA_FILE)
# Weights of other programs, and the same weights a second time.
_NEVER = ("*/*", "consolidated*.safetensors")


def open_hub(repo: str, revision: str | None, cache_dir: Path | None) -> StoredCheckpoint:
    """Downloads what is not in the cache yet: safetensors, or .bin files where there are none. Raises
    CheckpointError if the hub does not give it."""
    folder = _download(repo, revision, cache_dir, (*_COMMON, *_SAFETENSORS))
    if not any(folder.glob("*.safetensors")):
        folder = _download(repo, revision, cache_dir, (*_COMMON, *_BIN))
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin", MEDUSA_FILE)):
        raise CheckpointError(
            f"the hub's repository {repo!r} is not a checkpoint: it has neither safetensors nor "
            "pytorch_model.bin weights; from a repository of GGUF files, download one .gguf and pass its path"
        )
    return open_directory(folder, repo)


def _download(repo: str, revision: str | None, cache_dir: Path | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NEVER),
        )
    except Exception as error:  # the hub's own errors, its HTTP library's, the disk's: all mean no checkpoint
        raise CheckpointError(f"{repo!r} is not a path here, and {_reason(error, revision)}") from error
    return Path(folder)


def _reason(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "it is not a name that the hub could have: pass a directory, a .gguf file, or a hub id org/name"
    # A gated repository is also a "not found" one.
    if isinstance(error, errors.GatedRepoError):
        return (
            "the hub gives it only to those who accept its terms: accept them on its page, and log in "
            "with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"on the hub it has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or a private one: check the name, or log in with `hf auth login`"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return f"it could not be written to the hub's cache: {error.strerror}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        cause = error.__cause__ or error
        return (
            f"the hub could not be reached ({_first_line(cause)}) and it is not whole in the hub's cache: "
            "check the network, or pass a local directory"
        )
    return f"downloading it from the hub failed: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
