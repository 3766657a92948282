"""ed25519 signatures of a bundle's manifest.json, which holds the SHA-256 of every other file.

`manifest.sig` beside it is the 64 bytes of the signature and nothing else, so `openssl pkeyutl -verify -rawin` checks
it too. A signature says who vouches for a bundle, not that it is the newest one: an older bundle keeps its own.
"""

from __future__ import annotations

import importlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.errors import BundleError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "manifest.sig"
SIGNATURE_BYTES = 64
_MAX_KEY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Signer:
    """Whose signature a bundle must have."""

    file: Path
    """Of the public key: for messages."""
    key: Ed25519PublicKey

    def check(self, manifest: bytes, folder: Path, *, name: Path) -> None:
        """Raises BundleError unless the signature in `folder` is this signer's of exactly these bytes. `name` is
        what errors call the bundle."""
        signature = _read_signature(folder, name)
        invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
        try:
            self.key.verify(signature, manifest)
        except invalid:
            raise BundleError(
                f"{name}: {SIGNATURE} does not sign this manifest.json with the key of {self.file}: another key signed "
                "it, or one of the two files was changed; get the bundle again from where it was signed"
            ) from None


def load_signer(path: Path) -> Signer:
    """The public key in a file: PEM, or a line as ssh-keygen writes it. Raises ConfigError."""
    content = _read_key(path)
    serialization = _serialization()
    is_ssh = not content.lstrip().startswith(b"-----BEGIN")
    if b"PRIVATE KEY-----" in content:
        raise ConfigError(f"{path} holds a private key: give the public one, which is what servers need")
    try:
        key: Any = (serialization.load_ssh_public_key if is_ssh else serialization.load_pem_public_key)(content)
    except Exception as error:  # what is raised differs by format and release
        raise ConfigError(
            f"{path} holds no public key: give the .pub file that `graphspec sign --generate-key` or ssh-keygen wrote, "
            "or what `openssl pkey -pubout` prints"
        ) from error
    _check_kind(key, "Ed25519PublicKey", path)
    return Signer(path, key)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file, PEM as openssl or ssh-keygen writes it. Raises ConfigError."""
    content = _read_key(path)
    serialization = _serialization()
    is_ssh = b"OPENSSH PRIVATE KEY-----" in content
    load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
    try:
        key: Ed25519PrivateKey = load(content, password=None)
    except TypeError as error:  # the library's way to ask for the passphrase
        raise ConfigError(
            f"{path} is protected by a passphrase: write a copy without one for signing (ssh-keygen -p, or openssl "
            "pkey), readable by you alone"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{path} holds no private key: make one with `graphspec sign --generate-key FILE`, `openssl genpkey "
            "-algorithm ed25519` or `ssh-keygen -t ed25519`"
        ) from error
    _check_kind(key, "Ed25519PrivateKey", path)
    return key


def write_signature(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Signs these bytes of manifest.json; the signature in `folder` replaces an earlier one. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / SIGNATURE, flags, 0o644), "wb") as file:
        file.write(key.sign(manifest))


def generate_key(path: Path) -> Path:
    """Writes a new private key at `path`, for its owner's eyes, and the public one beside it → where that is.

    Raises ConfigError where either file exists; OSError.
    """
    public_path = path.with_name(path.name + ".pub")
    for existing in (path, public_path):
        if os.path.lexists(existing):
            raise ConfigError(f"{existing} exists: a key is never replaced; choose another name")
    serialization = _serialization()
    ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    for file, content, mode in ((path, private, 0o600), (public_path, public, 0o644)):
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(content)
    return public_path


def _read_signature(folder: Path, name: Path) -> bytes:
    path = folder / SIGNATURE
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise BundleError(f"{name}: {SIGNATURE} is not a plain file: copy the signature itself")
        if info.st_size != SIGNATURE_BYTES:
            raise BundleError(
                f"{name}: {SIGNATURE} has {info.st_size} bytes, and a signature has {SIGNATURE_BYTES}: copy it again"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise BundleError(
            f"{name} is not signed: it has no {SIGNATURE}, and a signature is required; sign it where the private key "
            f"is: graphspec sign {name} --key KEYFILE"
        ) from None
    except OSError as error:
        raise BundleError(f"{name}: {SIGNATURE} cannot be read: {error.strerror}") from None


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from None


def _check_kind(key: object, kind: str, path: Path) -> None:
    ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    if not isinstance(key, getattr(ed25519, kind)):
        raise ConfigError(f"{path} holds a key of another kind: signatures of bundles are ed25519")


def _serialization() -> Any:
    """Imported late: bundles that nobody signs need no cryptography. Raises ConfigError that says what to install."""
    try:
        return importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise ConfigError(
            f"signatures need the Python package cryptography ({error}); install it with: "
            "pip install 'graphspec-llm[sign]'"
        ) from error
