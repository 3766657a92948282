"""A bundle on disk, read: nothing in it is used before its manifest, its files and its backend are checked.

Writing one is in staging.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue, ValidationError

from graphspec.errors import BundleError
from graphspec.manifest import FORMAT, Backend, FileEntry, Manifest, numeric
from graphspec.signing import SIGNATURE, Signer, write_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
"""No real manifest comes near it; a larger file is not read into memory."""
_BLOCK = 1 << 20

OnFile = Callable[[str, int], None]
"""Called with a file's path inside the bundle and its size in bytes, before it is hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a server can run."""

    backend: Backend
    version: str
    """Of the backend's library."""
    device_classes: frozenset[str]
    """Every class this machine's device belongs to, for example {"x86_64", "x86_64-vnni"}."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was checked."""

    root: Path
    """Links resolved: a link to the current bundle that moves later cannot mix two bundles."""
    manifest: Manifest

    def path(self, file: str) -> Path:
        """Where a file the manifest lists lies. Raises BundleError for any other."""
        if file not in self.manifest.files:
            raise BundleError(f"{self.root} has no file {printable(file)} in its manifest")
        return self.root / file

    def read(self, file: str) -> bytes:
        """The bytes of a graph or engine, hashed as they are read: what a backend is handed is what the manifest
        lists, also where the file was swapped after it was checked, or not checked. Raises BundleError."""
        path, entry = self.path(file), self.manifest.files[file]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{self.root}: {file} cannot be read: {error.strerror}") from None
        found = hashlib.sha256(content).hexdigest()
        if found != entry.sha256:
            raise BundleError(
                f"{self.root} is damaged: {file} has sha256 {found[:12]}… instead of {entry.sha256[:12]}…; "
                f"{_rebuild({'build_command': self.manifest.build_command}, self.root)}"
            )
        return content

    def confirm(self) -> None:
        """Raises BundleError if the bundle was replaced since it was opened. Call it when everything is loaded:
        files read before and after a replacement do not belong together."""
        if not _is_current(self.root, self.manifest):
            raise BundleError(f"{self.root} was replaced while it was loaded: load it again")


def open_bundle(
    bundle: Path,
    *,
    verify: bool = True,
    host: Host | None = None,
    signer: Signer | None = None,
    on_file: OnFile | None = None,
) -> Bundle:
    """Checks a bundle before a byte of it reaches a backend: that `signer` signed its manifest, the manifest, then
    whether `host` can run it, then that exactly the listed files are there, in size and, with `verify`, in hash.
    Raises BundleError.
    """
    root = Path(os.path.realpath(bundle))
    while True:
        manifest = read_manifest(root, name=bundle, signer=signer)
        if host is not None:
            check_host(manifest, host, name=bundle)
        try:
            _check_files(root, bundle, manifest, hashes=verify, on_file=on_file)
        except BundleError:
            # Half of one bundle and half of the next look damaged: look again at the next.
            if _is_current(root, manifest):
                raise
            continue
        if _is_current(root, manifest):
            return Bundle(root, manifest)


def verify_bundle(bundle: Path, *, signer: Signer | None = None, on_file: OnFile | None = None) -> Manifest:
    """Checks the signature, if `signer` must have signed, the manifest and every file. Raises one BundleError that
    names everything wrong."""
    return open_bundle(bundle, signer=signer, on_file=on_file).manifest


def sign_bundle(bundle: Path, key: Ed25519PrivateKey, *, on_file: OnFile | None = None) -> None:
    """Checks every file, then signs the manifest; an earlier signature is replaced. Raises BundleError, OSError."""
    opened = open_bundle(bundle, on_file=on_file)
    content = _manifest_bytes(opened.root, bundle)
    if _parse(content, bundle).get("checksum") != opened.manifest.checksum:
        raise BundleError(f"{bundle} was replaced while it was checked: sign it again")
    write_signature(opened.root, content, key)


def existing_key(out: Path) -> str | None:
    """The key of the bundle at `out` if it is sound (hashes are not computed), for a build to skip."""
    try:
        return open_bundle(out, verify=False).manifest.key
    except BundleError:
        return None


def input_key(parts: Mapping[str, JsonValue]) -> str:
    """SHA-256 of canonical JSON: equal for equal inputs, in whatever order. Raises ValueError for NaN."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path, *, sync: bool = False) -> FileEntry:
    """Size and SHA-256 of the bytes read; `sync` also waits until they are on the disk. Raises OSError."""
    digest, size, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return FileEntry(size=size, sha256=digest.hexdigest())


def encode(manifest: Manifest) -> bytes:
    """The text of manifest.json, with its checksum."""
    fields = manifest.model_dump(mode="json", exclude={"checksum"})
    return json.dumps(fields | {"checksum": input_key(fields)}, indent=2, allow_nan=False).encode() + b"\n"


def read_manifest(bundle: Path, *, name: Path | None = None, signer: Signer | None = None) -> Manifest:
    """Reads manifest.json and checks all of it; looks at no other file but, where `signer` must have signed it, the
    signature: before anything in the manifest is looked at. `name` is what errors call the bundle.

    Raises BundleError: not a bundle, not signed, written in another format, written by a newer graphspec, or changed
    since.
    """
    name = name or bundle
    content = _manifest_bytes(bundle, name)
    if signer is not None:
        signer.check(content, bundle, name=name)
    raw = _parse(content, name)
    _check_format(raw, name)
    try:
        # By way of JSON, where strictness accepts an array for a tuple and still no "3" for a 3.
        manifest = Manifest.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise BundleError(_schema_message(error, raw, name)) from None
    if manifest.checksum != input_key({field: value for field, value in raw.items() if field != "checksum"}):
        raise BundleError(f"{name}: {MANIFEST} was changed after the bundle was written; {_rebuild(raw, name)}")
    return manifest


def read_raw(bundle: Path, *, name: Path) -> dict[str, JsonValue]:
    """manifest.json as JSON, of whatever format. Raises BundleError where that is not a bundle's."""
    return _parse(_manifest_bytes(bundle, name), name)


def _manifest_bytes(bundle: Path, name: Path) -> bytes:
    path = bundle / MANIFEST
    try:
        if not bundle.is_dir():
            raise BundleError(f"{name} is not a bundle: there is no such folder")
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise BundleError(f"{name} is not a bundle: its {MANIFEST} is not a plain file")
        if info.st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{name} is not a bundle: its {MANIFEST} has {info.st_size} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise BundleError(f"{name} is not a bundle: it has no {MANIFEST}") from None
    except OSError as error:
        raise BundleError(f"{name}: {MANIFEST} cannot be read: {error.strerror}") from None


def _parse(content: bytes, name: Path) -> dict[str, JsonValue]:
    try:
        raw = json.loads(content, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name} is not a bundle: its {MANIFEST} is not JSON ({printable(error)})") from None
    if not isinstance(raw, dict) or type(raw.get("format")) is not int:
        raise BundleError(f"{name} is not a bundle: its {MANIFEST} is not an object with a format number")
    return raw


def check_host(manifest: Manifest, host: Host, *, name: Path) -> None:
    """Raises BundleError, with what was found and expected, where `host` cannot run the bundle's graphs."""
    built = manifest.backend
    rebuild = _rebuild({"build_command": manifest.build_command}, name)
    if host.backend != built.name:
        raise BundleError(f"{name} was built for {built.name}, and this server runs {host.backend}; {rebuild}")
    oldest, have = numeric(built.min_version or built.version), numeric(host.version)
    if have < oldest or (built.min_version is None and have != oldest):
        needs = f"{built.min_version} or newer" if built.min_version else f"exactly {built.version}"
        raise BundleError(
            f"{name} was built for {built.name} {needs}, and this server has {printable(host.version)}: install "
            f"that version, or {rebuild}"
        )
    if built.device_class not in host.device_classes:
        have_classes = ", ".join(sorted(host.device_classes)) or "none that is known"
        raise BundleError(
            f"{name} was built for device class {printable(built.device_class)}, and this machine's are: "
            f"{have_classes}; on this machine, {rebuild}"
        )


def rebuild_command(command: str, bundle: Path) -> str:
    """A manifest's build_command for the bundle where it lies now, wherever it was built; it replaces it."""
    try:
        words = shlex.split(command)
        at = words.index("-o") + 1
        words[at] = os.path.abspath(bundle)
    except (ValueError, IndexError):
        return command  # somebody else wrote it
    return shlex.join(words if "--overwrite" in words else [*words, "--overwrite"])


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything under `root` but folders, by its path with slashes; links are not followed. Raises OSError."""
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            for inner, inner_info in walk(root / entry.name):
                yield f"{entry.name}/{inner}", inner_info
        else:
            yield entry.name, info


def is_about(file: str, info: os.stat_result) -> bool:
    """Whether it is the manifest or its signature: files that no manifest lists."""
    return file == MANIFEST or (file == SIGNATURE and stat.S_ISREG(info.st_mode))


def printable(text: object) -> str:
    """Text from a file, fit for one line of a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[:2000])
    return shown if len(str(text)) <= 2000 else shown + "…"


def _check_files(root: Path, name: Path, manifest: Manifest, *, hashes: bool, on_file: OnFile | None = None) -> None:
    try:
        found = {file: info for file, info in walk(root) if not is_about(file, info)}
    except OSError as error:
        where = printable(os.path.relpath(error.filename, root))
        raise BundleError(f"{name}: {where} cannot be read: {error.strerror}") from None
    problems = [_extra_problem(file, info) for file, info in found.items() if file not in manifest.files]
    for file, entry in manifest.files.items():
        problem = _size_problem(found.get(file), entry)
        if problem is None and hashes:
            if on_file is not None:
                on_file(file, entry.size)
            problem = _hash_problem(root / file, entry)
        if problem is not None:
            problems.append(f"{file} {problem}")
    if problems:
        rebuild = _rebuild({"build_command": manifest.build_command}, name)
        raise BundleError(f"{name} is damaged: {'; '.join(problems)}; {rebuild}")


def _is_current(root: Path, manifest: Manifest) -> bool:
    try:
        return read_raw(root, name=root).get("checksum") == manifest.checksum
    except BundleError:
        return False


def _extra_problem(file: str, info: os.stat_result) -> str:
    what = "symbolic link " if stat.S_ISLNK(info.st_mode) else ""
    return f"{what}{printable(file)} is not in the manifest"


def _size_problem(info: os.stat_result | None, entry: FileEntry) -> str | None:
    if info is None:
        return "is missing"
    if stat.S_ISLNK(info.st_mode):
        return "is a symbolic link: copy the file itself"
    if not stat.S_ISREG(info.st_mode):
        return "is not a plain file"
    if info.st_size != entry.size:
        return f"has {info.st_size} bytes instead of {entry.size}"
    return None


def _hash_problem(path: Path, entry: FileEntry) -> str | None:
    try:
        found = hash_file(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found != entry:
        return f"has sha256 {found.sha256[:12]}… instead of {entry.sha256[:12]}…"
    return None


def _check_format(raw: Mapping[str, JsonValue], name: Path) -> None:
    if raw["format"] != FORMAT:
        writer = printable(raw.get("graphspec_version", "of unknown version"))
        raise BundleError(
            f"{name} was written by graphspec {writer} in bundle format {printable(raw['format'])}, and this graphspec "
            f"{this_version()} reads format {FORMAT}: install graphspec {writer}, or {_rebuild(raw, name)}"
        )


def _schema_message(error: ValidationError, raw: Mapping[str, JsonValue], name: Path) -> str:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    places = {".".join(map(str, detail["loc"])): detail for detail in details}
    unknown = [place for place, detail in places.items() if detail["type"] == "extra_forbidden"]
    if unknown:
        return (
            f"{name}: {MANIFEST} has fields that graphspec {this_version()} does not know: "
            f"{printable(', '.join(unknown))}. A newer graphspec probably wrote it (it says "
            f"{printable(raw.get('graphspec_version'))}): install that version, or {_rebuild(raw, name)}"
        )
    said = [f"{place}: {detail['msg']}" if place else detail["msg"] for place, detail in places.items()]
    return f"{name}: {MANIFEST} is invalid: {printable('; '.join(said))}; {_rebuild(raw, name)}"


def _rebuild(raw: Mapping[str, JsonValue], bundle: Path) -> str:
    command = raw.get("build_command")
    if not isinstance(command, str) or not command.strip():
        return "build it again"
    return f"rebuild it with: {printable(rebuild_command(command, bundle))}"


def this_version() -> str:
    """graphspec's own version, imported late: graphspec/__init__.py may import this module."""
    from graphspec import __version__

    return __version__


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    if len(fields := dict(pairs)) != len(pairs):
        raise ValueError("a field is given twice")
    return fields


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number
