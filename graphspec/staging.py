"""A bundle on disk, written: whole or not at all, whatever goes wrong on the way.

    .out.tmp-<pid>-<random>/    files, then manifest.json
        │ rename                (an earlier bundle waits as .out.old-… meanwhile, and comes back on failure)
        ▼
    out/

Two locks, both released by the system when their owner dies: a build holds one on its own folder for as long
as it lives, which is how a later build tells leftovers from work in progress (also across containers, where
process ids mean nothing); and one on the folder around them for the moments in which names change.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from graphspec.bundle import (
    MANIFEST,
    OnFile,
    encode,
    existing_key,
    hash_file,
    is_about,
    printable,
    read_raw,
    this_version,
    verify_bundle,
    walk,
)
from graphspec.errors import BuildError, BundleError
from graphspec.manifest import FORMAT, FileEntry, Manifest

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Stage:
    """A bundle being written: put files under `path`, then `commit`."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self._out = out
        """What the user called it: for messages."""
        self._target = Path(os.path.realpath(out))
        self._overwrite = overwrite
        self._lock = -1
        self._made: list[Path] = []
        self._aside = _beside(self._target, "old")
        self._trash = _beside(self._target, "tmp")
        self.path = _beside(self._target, "tmp")
        """A folder of this build's own, on the file system of the bundle."""
        self.committed = False

    def commit(self, fields: Mapping[str, object], *, on_file: OnFile | None = None) -> Manifest:
        """Hashes every file, writes manifest.json last and puts the bundle in place.

        Where a sound bundle of the same key has come there meanwhile, by a build at the same time, that one stays
        and its manifest is returned; `committed` is False then. With `overwrite` it is replaced like any other.
        `fields` are the manifest's, but `format`, `graphspec_version`, `created`, `files` and `checksum`, which
        are filled in. Raises BuildError; pydantic's ValidationError if the fields are no manifest.
        """
        if self.committed:
            raise RuntimeError("this stage was committed already")
        ours: dict[str, object] = {
            "format": FORMAT,
            "graphspec_version": this_version(),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "files": _hash_files(self.path, on_file),
        }
        manifest = Manifest.model_validate({**fields, **ours})
        text = encode(manifest)
        with (self.path / MANIFEST).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for folder, _, _ in os.walk(self.path):
            _sync_folder(Path(folder))
        with _locked(self._target.parent):
            if not self._overwrite and (equal := _sound(self._target, manifest.key)):
                return equal
            self._put_in_place()
            _sync_folder(self._target.parent)
        return Manifest.model_validate_json(text)

    def _put_in_place(self) -> None:
        try:
            if self._replaces():
                self._target.rename(self._aside)
            self.path.rename(self._target)
            self.committed = True
        except OSError as error:
            raise BuildError(f"{self._out} could not be put in place: {error.strerror}; build it again") from error
        finally:
            _settle(self._aside, self._target, self._trash)

    def _replaces(self) -> bool:
        """Whether a bundle is there that may be replaced. Raises BuildError where something may not be."""
        if not _is_bundle(self._out):
            return False
        if not self._overwrite:
            raise BuildError(f"{self._out} exists: pass --overwrite to replace it, or choose another place")
        return True

    def _open(self, needed_bytes: int | None) -> None:
        parent = self._target.parent
        try:
            self._make_parents()
            with _locked(parent) as locked:
                if locked:
                    _sweep(self._target)
                self._replaces()
                self.path.mkdir()
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                _try_lock(self._lock)
        except OSError as error:
            raise BuildError(f"{self._out} cannot be written: {_reason(error)}; choose another place") from error
        # After the folder was made: file systems that take no files at all (/proc) say that they are full.
        if needed_bytes is not None and shutil.disk_usage(parent).free < needed_bytes:
            raise BuildError(_full_message(self._out, parent, needed_bytes))

    def _make_parents(self) -> None:
        parent = self._target.parent
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)

    def _close(self) -> None:
        _settle(self._aside, self._target, self._trash)
        shutil.rmtree(self._trash, ignore_errors=True)
        if not self.committed:
            shutil.rmtree(self.path, ignore_errors=True)
            for folder in reversed(self._made):
                with suppress(OSError):  # something else is in it by now
                    folder.rmdir()
        if self._lock >= 0:
            os.close(self._lock)


@contextmanager
def staging(out: Path, *, overwrite: bool = False, needed_bytes: int | None = None) -> Iterator[Stage]:
    """A new bundle for `out`, which nothing touches before the stage's `commit`. Left in any other way, by an
    exception or without a commit, it leaves nothing behind and an earlier bundle as it was.

    With `overwrite` an earlier bundle is replaced; anything else that is there never is. `needed_bytes` is the
    size of the bundle where it is known: a disk too small for it is then an error before the work, not after.
    Raises BuildError, also for a disk that fills up in the block within.
    """
    stage = Stage(out, overwrite=overwrite)
    try:
        stage._open(needed_bytes)
        yield stage
    except Exception as error:
        if is_full(error):
            raise BuildError(_full_message(out, stage.path.parent, needed_bytes)) from error
        if _is_too_large(error):
            raise BuildError(
                f"{out} cannot be written: a file of it is larger than this process or the file system allows; "
                "raise the limit (ulimit -f), or choose another place"
            ) from error
        raise
    finally:
        stage._close()


def check_place(out: Path) -> None:
    """Raises BuildError if something is at `out` that no build may replace, with --overwrite or without: before any
    work. An empty folder, or none, is a place; a bundle may be one."""
    parent = Path(os.path.realpath(out)).parent
    try:
        if os.path.isdir(parent):
            with _locked(parent):
                _is_bundle(out)
    except OSError as error:
        raise BuildError(f"{out} cannot be written: {_reason(error)}; choose another place") from error


def check_dump_folder(folder: Path) -> None:
    """Raises BuildError if --dump-passes could not write there, as far as that can be told before the work."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    reason = "not a folder" if not os.path.isdir(existing) else "permission denied"
    if reason == "not a folder" or not os.access(existing, os.W_OK | os.X_OK):
        raise BuildError(f"--dump-passes {folder} cannot be written: {existing}: {reason}; choose another folder")


def _sound(target: Path, key: str) -> Manifest | None:
    """The manifest of the bundle of that key at `target`, if it is whole."""
    try:
        return verify_bundle(target) if existing_key(target) == key else None
    except BundleError:
        return None


def _is_bundle(out: Path) -> bool:
    """False where nothing is, or an empty folder. Raises BuildError for anything that no build may replace."""
    target = Path(os.path.realpath(out))
    try:
        if not os.path.lexists(target):
            return False
        if not target.is_dir():
            raise BuildError(f"{out} is not a folder: choose another place for the bundle")
        if not os.listdir(target):
            return False
        files = read_raw(target, name=out).get("files")
        listed = files if isinstance(files, dict) else {}
        foreign = [printable(file) for file, info in walk(target) if not is_about(file, info) and file not in listed]
    except BundleError as error:
        said = str(error).replace(" is not a bundle", " exists and is not a bundle", 1)
        raise BuildError(f"{said}; choose another place, or move it away") from None
    if foreign:
        raise BuildError(
            f"{out} holds files its manifest does not list, which replacing it would delete: "
            f"{', '.join(foreign)}; move them away, or choose another place"
        )
    return True


def _reason(error: OSError) -> str:
    """Why nothing can be written, and in which folder."""
    folder = os.path.dirname(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else ""
    if error.errno == errno.ENOENT and os.path.isdir(folder):  # what /proc and its like say
        return f"nothing can be made in {folder}"
    return f"{error.strerror} in {folder}" if error.errno in _NOT_ALLOWED else str(error.strerror)


def _beside(target: Path, what: str) -> Path:
    """A name no other build uses; the process id in it is for people."""
    return target.parent / f".{target.name}.{what}-{os.getpid()}-{secrets.token_hex(4)}"


def _hash_files(root: Path, on_file: OnFile | None) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for file, info in walk(root):
        if not stat.S_ISREG(info.st_mode):
            raise BuildError(f"{printable(file)} is not a plain file: a bundle holds no links or devices")
        if on_file is not None:
            on_file(file, info.st_size)
        files[file] = hash_file(root / file, sync=True)
    return files


def _settle(aside: Path, target: Path, trash: Path) -> None:
    """Ends a replacement, however far it got: the earlier bundle comes back unless there is a new one."""
    if not os.path.lexists(aside):
        return
    if os.path.lexists(target):
        # Renamed first: a folder named "old" is always whole, also if this is killed half-way.
        shutil.rmtree(aside.rename(trash), ignore_errors=True)
    else:
        aside.rename(target)


def _sweep(target: Path) -> None:
    """Clears what builds of the same bundle left that were killed; the folder around it is locked."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"(tmp|old)-[0-9]+-[0-9a-f]{8}")
    for name in os.listdir(target.parent):
        found, path = pattern.fullmatch(name), target.parent / name
        if found is None or path.is_symlink() or not path.is_dir():
            continue
        if found[1] == "old":
            _settle(path, target, _beside(target, "tmp"))
        elif _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _try_lock(folder)
    finally:
        os.close(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Waits for the folder's lock. Yields False on a file system that has none: then only the names, which
    are unique, keep builds apart."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error."""
    return _is_behind(error, _FULL, "No space left on device")


def _is_too_large(error: BaseException) -> bool:
    """Whether a limit on the size of a file is behind an error, which then names no file."""
    return _is_behind(error, (errno.EFBIG,), "File too large")


def _is_behind(error: BaseException | None, codes: tuple[int, ...], words: str) -> bool:
    """Whether an error or a cause of it has one of these codes. Writers in other languages tell it only in words."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in codes) or words in str(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _full_message(out: Path, parent: Path, needed_bytes: int | None) -> str:
    free = shutil.disk_usage(parent).free if parent.exists() else 0
    needs = "" if needed_bytes is None else f"; the bundle needs {needed_bytes} bytes"
    return (
        f"disk full: {out} cannot be written ({free} bytes are free there{needs}): free some, or choose another place"
    )
