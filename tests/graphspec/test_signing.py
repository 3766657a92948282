"""A bundle that the required key did not sign, exactly as it is, is refused before anything in it is read."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Command
from hypothesis import given, settings
from hypothesis import strategies as st

import graphspec
from graphspec.bundle import MANIFEST, existing_key, open_bundle, read_manifest, sign_bundle, verify_bundle
from graphspec.errors import BundleError, ConfigError
from graphspec.signing import SIGNATURE, generate_key, load_private_key, load_signer
from graphspec.staging import staging

ARTIFACT = Path(__file__).parent / "artifacts" / "format-1"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    assert generate_key(path) == path.with_name("key.pub")
    return path


@pytest.fixture(scope="module")
def public(key: Path) -> Path:
    return key.with_name("key.pub")


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    copy = Path(shutil.copytree(ARTIFACT, tmp_path / "bundle"))
    sign_bundle(copy, load_private_key(key))
    return copy


def refusal(bundle: Path, public: Path) -> str:
    with pytest.raises(BundleError) as caught:
        verify_bundle(bundle, signer=load_signer(public))
    assert str(caught.value).isprintable()
    return str(caught.value)


def openssl(*words: object) -> bytes:
    return subprocess.run(["openssl", *map(str, words)], capture_output=True, timeout=60, check=True).stdout


def ssh_keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    words = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)]
    subprocess.run(words, capture_output=True, timeout=60, check=True)
    return path


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def test_a_signed_bundle_opens_for_its_signer_and_for_whom_no_signature_matters(signed: Path, public: Path) -> None:
    assert verify_bundle(signed, signer=load_signer(public)) == verify_bundle(signed) == read_manifest(ARTIFACT)
    assert existing_key(signed) == read_manifest(ARTIFACT).key


@needs_openssl
def test_openssl_agrees_that_the_signature_is_one(signed: Path, public: Path) -> None:
    words = ("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", signed / MANIFEST)
    assert b"Verified Successfully" in openssl(*words, "-sigfile", signed / SIGNATURE)


@needs_openssl
def test_a_key_and_a_signature_of_openssl_are_taken(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(ARTIFACT, tmp_path / "bundle"))
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    words = ("pkeyutl", "-sign", "-inkey", private, "-rawin", "-in", bundle / MANIFEST)
    openssl(*words, "-out", bundle / SIGNATURE)
    verify_bundle(bundle, signer=load_signer(public))
    theirs = (bundle / SIGNATURE).read_bytes()
    sign_bundle(bundle, load_private_key(private))
    assert (bundle / SIGNATURE).read_bytes() == theirs, "ed25519 is deterministic"


@needs_ssh_keygen
def test_keys_of_ssh_keygen_are_taken(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(ARTIFACT, tmp_path / "bundle"))
    private = ssh_keygen(tmp_path / "id")
    sign_bundle(bundle, load_private_key(private))
    verify_bundle(bundle, signer=load_signer(private.with_name("id.pub")))


def test_a_private_key_is_for_its_owner_only_and_never_replaced(tmp_path: Path) -> None:
    public = generate_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    before = (tmp_path / "key").read_bytes(), public.read_bytes()
    with pytest.raises(ConfigError, match="key exists: a key is never replaced"):
        generate_key(tmp_path / "key")
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match=r"key\.pub exists: a key is never replaced"):
        generate_key(tmp_path / "key")
    assert public.read_bytes() == before[1]


def test_a_bundle_without_a_signature_is_refused_where_one_is_required(public: Path) -> None:
    said = refusal(ARTIFACT, public)
    assert "is not signed: it has no manifest.sig" in said
    assert f"graphspec sign {ARTIFACT} --key KEYFILE" in said


def test_a_signature_by_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    assert "manifest.sig does not sign this manifest.json with the key of" in refusal(
        signed, generate_key(tmp_path / "other")
    )


@settings(max_examples=40, deadline=None)
@given(file=st.sampled_from((MANIFEST, SIGNATURE)), where=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_any_flipped_byte_of_manifest_or_signature_is_found(
    key: Path, public: Path, file: str, where: int, flip: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(shutil.copytree(ARTIFACT, Path(folder) / "bundle"))
        sign_bundle(bundle, load_private_key(key))
        content = bytearray((bundle / file).read_bytes())
        content[where % len(content)] ^= flip
        (bundle / file).write_bytes(content)
        assert "manifest.sig does not sign this manifest.json" in refusal(bundle, public)


@pytest.mark.parametrize("size", [0, 63, 65, 1 << 34])
def test_a_signature_of_another_length_is_refused_unread(signed: Path, public: Path, size: int) -> None:
    os.truncate(signed / SIGNATURE, size)
    assert f"manifest.sig has {size} bytes, and a signature has 64" in refusal(signed, public)


def test_a_manifest_resealed_after_a_change_is_refused(signed: Path, public: Path) -> None:
    """What a checksum cannot find: whoever changes a file can write a manifest that fits."""
    with staging(signed, overwrite=True) as stage:
        for name in ("graphs", "tokenizer", "weights"):
            shutil.copytree(ARTIFACT / name, stage.path / name)
        (stage.path / "graphs" / "step.onnx").write_bytes(b"other bytes")
        filled_in = {"format", "graphspec_version", "created", "files", "checksum"}
        stage.commit(read_manifest(ARTIFACT).model_dump(exclude=filled_in))
    verify_bundle(signed)
    assert "is not signed" in refusal(signed, public)
    sign_bundle(Path(shutil.copytree(ARTIFACT, signed.with_name("first"))), load_private_key(public.with_name("key")))
    shutil.copy(signed.with_name("first") / SIGNATURE, signed)
    assert "manifest.sig does not sign this manifest.json" in refusal(signed, public)


def test_a_changed_file_is_found_by_the_signed_hashes(signed: Path, public: Path) -> None:
    content = (signed / "weights/model.safetensors").read_bytes()
    (signed / "weights/model.safetensors").write_bytes(content[::-1])
    assert "is damaged: weights/model.safetensors has sha256" in refusal(signed, public)


def test_nothing_in_the_manifest_is_looked_at_before_its_signature(signed: Path, public: Path) -> None:
    (signed / MANIFEST).write_text("[" * 100_000)
    assert "manifest.sig does not sign this manifest.json" in refusal(signed, public)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(ARTIFACT / MANIFEST), os.mkfifo])
def test_what_is_no_plain_file_is_no_signature(signed: Path, public: Path, make: Callable[[Path], object]) -> None:
    (signed / SIGNATURE).unlink()
    make(signed / SIGNATURE)
    assert "manifest.sig is not a plain file" in refusal(signed, public)


def test_a_link_in_place_of_the_signature_is_refused_by_whom_none_matters_too(signed: Path) -> None:
    (signed / SIGNATURE).rename(signed.with_name("elsewhere"))
    (signed / SIGNATURE).symlink_to(signed.with_name("elsewhere"))
    with pytest.raises(BundleError, match=r"symbolic link manifest\.sig is not in the manifest"):
        open_bundle(signed)


def test_a_damaged_bundle_is_not_signed(tmp_path: Path, key: Path) -> None:
    bundle = Path(shutil.copytree(ARTIFACT, tmp_path / "bundle"))
    (bundle / "weights/model.safetensors").unlink()
    with pytest.raises(BundleError, match="is damaged"):
        sign_bundle(bundle, load_private_key(key))
    assert not (bundle / SIGNATURE).exists()


@pytest.mark.parametrize("load", [load_signer, load_private_key])
def test_what_holds_no_key_is_one_line(tmp_path: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(ConfigError, match=r"the key .*absent cannot be read: No such file"):
        load(tmp_path / "absent")
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"noise holds no (public|private) key"):
        load(tmp_path / "noise")


def test_the_two_halves_of_a_key_are_told_apart(key: Path, public: Path) -> None:
    with pytest.raises(ConfigError, match="holds a private key: give the public one"):
        load_signer(key)
    with pytest.raises(ConfigError, match="holds no private key"):
        load_private_key(public)


@needs_openssl
@needs_ssh_keygen
def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    openssl("genpkey", "-algorithm", "ed448", "-out", tmp_path / "ed448")
    openssl("pkey", "-in", tmp_path / "ed448", "-pubout", "-out", tmp_path / "ed448.pub")
    ssh_keygen(tmp_path / "ecdsa", "ecdsa")
    for name in ("ed448", "ecdsa"):
        with pytest.raises(ConfigError, match="holds a key of another kind: signatures of bundles are ed25519"):
            load_private_key(tmp_path / name)
        with pytest.raises(ConfigError, match="holds a key of another kind: signatures of bundles are ed25519"):
            load_signer(tmp_path / f"{name}.pub")


@needs_openssl
@needs_ssh_keygen
def test_a_key_with_a_passphrase_says_so(tmp_path: Path) -> None:
    words = ("-algorithm", "ed25519", "-aes-256-cbc", "-pass", "pass:word", "-out", tmp_path / "pem")
    openssl("genpkey", *words)
    for path in (tmp_path / "pem", ssh_keygen(tmp_path / "ssh", passphrase="word")):
        with pytest.raises(ConfigError, match="is protected by a passphrase"):
            load_private_key(path)


def test_without_cryptography_the_error_says_what_to_install(
    signed: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def import_module(name: str) -> object:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ConfigError, match=r"pip install 'graphspec-llm\[sign\]'"):
        load_signer(public)
    verify_bundle(signed)


def test_cryptography_is_imported_only_where_a_signature_is_asked_for(signed: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from graphspec.bundle import verify_bundle; "
        f"verify_bundle(Path({str(signed)!r})); print('cryptography' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "False\n"


def test_the_command_line_makes_a_key_signs_and_verifies(tmp_path: Path, run: Command) -> None:
    bundle = Path(shutil.copytree(ARTIFACT, tmp_path / "bundle"))
    key = tmp_path / "key"
    assert run("sign", "--generate-key", key).out == f"{key}: keep it secret; servers need {key}.pub\n"
    result = run("sign", bundle, "--key", key)
    assert (result.status, result.out) == (0, f"{bundle}: signed, manifest.sig written\n")
    result = run("verify", bundle, "--require-signature", f"{key}.pub")
    assert (result.status, result.out) == (
        0,
        f"{bundle}: 3 files, all as they were written, signed by the key of {key}.pub\n",
    )


@pytest.mark.parametrize(
    "words", ["", "BUNDLE", "--key KEY", "BUNDLE --generate-key KEY", "BUNDLE --key KEY --generate-key KEY"]
)
def test_half_a_command_is_a_usage_error(run: Command, words: str) -> None:
    result = run("sign", *words.split())
    assert result.status == 2
    assert result.errors == ["error: give a BUNDLE and its --key KEYFILE, or --generate-key FILE alone to make one"]


@pytest.mark.slow
def test_a_bundle_generates_only_with_the_required_signature(
    bundle: Path, key: Path, public: Path, tmp_path: Path, run: Command
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    ask = ("generate", copy, "--prompt", "abc", "--max-new-tokens", 4, "--require-signature", public)
    result = run(*ask)
    assert (result.status, result.out) == (1, "")
    assert f"error: {copy} is not signed" in result.errors[-1]
    assert run("sign", copy, "--key", key).status == 0
    assert run(*ask).status == 0
    raw = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(raw))
    result = run(*ask)
    assert (result.status, result.out) == (1, "")
    assert "manifest.sig does not sign this manifest.json" in result.errors[-1]
    assert run(*ask, "--no-verify").status == 2


def test_load_takes_the_public_key_as_a_path_and_hashes_what_it_vouches_for(signed: Path, public: Path) -> None:
    with pytest.raises(ConfigError, match="require_signature is 3: it must be the path of a public key"):
        graphspec.load(signed, require_signature=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a signature vouches for files only if they are hashed"):
        graphspec.load(signed, require_signature=public, verify=False)
    (signed / SIGNATURE).unlink()
    with pytest.raises(BundleError, match="is not signed"):
        graphspec.load(signed, require_signature=str(public))
