"""A bundle that is not exactly what was written is refused, and the error says what is wrong."""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec import __version__
from graphspec.bundle import (
    MANIFEST,
    Host,
    encode,
    existing_key,
    hash_file,
    input_key,
    open_bundle,
    read_manifest,
    rebuild_command,
    verify_bundle,
)
from graphspec.errors import BundleError
from graphspec.manifest import Backend, Manifest

ARTIFACT = Path(__file__).parent / "artifacts" / "format-1"
FILES = ("graphs/step.onnx", "tokenizer/tokenizer.json", "weights/model.safetensors")
Edit = Callable[[dict[str, Any]], object]


def rebuild(bundle: Path) -> str:
    """The artifact says `-o format-1`; what is said of a copy names where it lies."""
    return f"rebuild it with: graphspec build --model target --draft-model-path draft -o {bundle} --overwrite"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return shutil.copytree(ARTIFACT, tmp_path / "bundle")


def refusal(bundle: Path, **how: Any) -> str:
    """The message with which a bundle is refused; one line, whatever is in it."""
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle, **how)
    assert str(caught.value).isprintable()
    return str(caught.value)


def edit(bundle: Path, change: Edit, *, seal: bool = True) -> None:
    """Changes the manifest; with `seal`, as a graphspec that meant it would have written it."""
    raw = json.loads((bundle / MANIFEST).read_text())
    change(raw)
    if seal:
        rest = {name: value for name, value in raw.items() if name != "checksum"}
        canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        raw["checksum"] = sha256(canonical.encode()).hexdigest()
    (bundle / MANIFEST).write_text(json.dumps(raw))


@pytest.mark.parametrize("artifact", sorted(ARTIFACT.parent.iterdir()), ids=lambda path: path.name)
def test_every_format_ever_written_still_loads(artifact: Path) -> None:
    manifest = verify_bundle(artifact)
    assert f"format-{manifest.format}" == artifact.name
    assert manifest.backend.name == "onnxruntime"
    assert tuple(sorted(manifest.files)) == FILES


def test_what_is_written_is_what_is_read(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    (bundle / MANIFEST).write_bytes(encode(manifest))
    assert read_manifest(bundle) == manifest


def test_a_sound_bundle_opens_and_says_where_its_files_are(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.path("weights/model.safetensors").read_bytes() == bytes(range(256))
    with pytest.raises(BundleError, match=r"has no file \.\./x in its manifest"):
        opened.path("../x")


@pytest.mark.parametrize("verify", [True, False])
def test_bytes_for_a_backend_are_hashed_as_they_are_read(bundle: Path, verify: bool) -> None:
    opened = open_bundle(bundle, verify=verify)
    assert opened.read("graphs/step.onnx") == b"onnx bytes"
    (bundle / "graphs/step.onnx").write_bytes(b"ONNX BYTES")
    with pytest.raises(BundleError, match=r"is damaged: graphs/step\.onnx has sha256") as caught:
        opened.read("graphs/step.onnx")
    assert rebuild(bundle) in str(caught.value)
    (bundle / "graphs/step.onnx").unlink()
    with pytest.raises(BundleError, match=r"graphs/step\.onnx cannot be read: No such file"):
        opened.read("graphs/step.onnx")


def test_a_link_to_a_bundle_is_resolved_when_it_is_opened(bundle: Path) -> None:
    link = bundle.with_name("current")
    link.symlink_to(bundle)
    opened = open_bundle(link)
    link.unlink()
    assert opened.path("graphs/step.onnx").read_bytes() == b"onnx bytes"


def test_progress_names_each_file_and_its_size(bundle: Path) -> None:
    seen: list[tuple[str, int]] = []
    verify_bundle(bundle, on_file=lambda file, size: seen.append((file, size)))
    assert sorted(seen) == [(file, (bundle / file).stat().st_size) for file in FILES]


@settings(max_examples=60, deadline=None)
@given(file=st.sampled_from(FILES), where=st.integers(0, 255), flip=st.integers(1, 255))
def test_any_flipped_byte_of_a_file_is_found(file: str, where: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = shutil.copytree(ARTIFACT, Path(folder) / "bundle")
        data = bytearray((bundle / file).read_bytes())
        data[where % len(data)] ^= flip
        (bundle / file).write_bytes(data)
        said = refusal(bundle)
    assert f"is damaged: {file} has sha256" in said
    assert rebuild(bundle) in said


@settings(max_examples=100, deadline=None)
@given(where=st.integers(0, 1 << 30), flip=st.integers(1, 255))
def test_any_flipped_byte_of_the_manifest_is_found_or_changes_nothing(where: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = shutil.copytree(ARTIFACT, Path(folder) / "bundle")
        data = bytearray((bundle / MANIFEST).read_bytes())
        data[where % len(data)] ^= flip
        (bundle / MANIFEST).write_bytes(data)
        try:
            manifest = read_manifest(bundle)
        except BundleError:
            return
    assert manifest == read_manifest(ARTIFACT)


@settings(max_examples=30, deadline=None)
@given(file=st.sampled_from((*FILES, MANIFEST)), keep=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_found(file: str, keep: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = shutil.copytree(ARTIFACT, Path(folder) / "bundle")
        size = (bundle / file).stat().st_size
        cut = int(size * keep)
        if file == MANIFEST:
            cut = min(cut, size - 2)  # it ends in a brace and a newline; the newline is not missed
        os.truncate(bundle / file, cut)
        said = refusal(bundle, verify=False)
    expected = "is not JSON" if file == MANIFEST else f"{file} has {cut} bytes instead of {size}"
    assert expected in said


def test_a_missing_file_is_named(bundle: Path) -> None:
    (bundle / "tokenizer/tokenizer.json").unlink()
    said = refusal(bundle)
    assert "is damaged: tokenizer/tokenizer.json is missing; " in said
    assert rebuild(bundle) in said


def test_an_added_file_is_named_on_one_line(bundle: Path) -> None:
    (bundle / "graphs" / "ev\nil\x1b[31m.onnx").write_text("x")
    assert r"graphs/ev\nil\x1b[31m.onnx is not in the manifest" in refusal(bundle)


def test_everything_wrong_is_named_at_once(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("x")
    (bundle / "graphs/step.onnx").unlink()
    (bundle / "weights/model.safetensors").write_bytes(bytes(256))
    (bundle / "tokenizer/tokenizer.json").write_text("{}")
    said = refusal(bundle)
    for problem in (
        "notes.txt is not in the manifest",
        "graphs/step.onnx is missing",
        "weights/model.safetensors has sha256",
        "tokenizer/tokenizer.json has 2 bytes instead of 3",
    ):
        assert problem in said


def test_a_link_in_place_of_a_file_is_refused_even_if_its_bytes_are_right(bundle: Path) -> None:
    file = bundle / "weights/model.safetensors"
    file.rename(bundle.with_name("elsewhere"))
    file.symlink_to(bundle.with_name("elsewhere"))
    assert "weights/model.safetensors is a symbolic link" in refusal(bundle)


def test_a_link_in_place_of_a_folder_is_refused_even_if_its_files_are_right(bundle: Path) -> None:
    (bundle / "weights").rename(bundle.with_name("elsewhere"))
    (bundle / "weights").symlink_to(bundle.with_name("elsewhere"))
    said = refusal(bundle)
    assert "symbolic link weights is not in the manifest" in said
    assert "weights/model.safetensors is missing" in said


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_it(bundle: Path) -> None:
    (bundle / "graphs/step.onnx").unlink()
    os.mkfifo(bundle / "graphs/step.onnx")
    assert "graphs/step.onnx is not a plain file" in refusal(bundle)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: None, "there is no such folder"),
        (lambda path: path.write_text("x"), "there is no such folder"),
        (lambda path: path.mkdir(), "it has no manifest.json"),
        (lambda path: (path / MANIFEST).mkdir(parents=True), "its manifest.json is not a plain file"),
    ],
)
def test_what_is_no_bundle_is_called_that(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    make(tmp_path / "thing")
    assert f"thing is not a bundle: {said}" in refusal(tmp_path / "thing")


def test_a_link_to_itself_is_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in refusal(tmp_path / "loop")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"format": 1, "capacity": NaN}', "NaN is no finite number"),
        (b'{"format": 1, "capacity": 1e999}', "1e999 is no finite number"),
        (b'{"format": 1, "format": 1}', "a field is given twice"),
        (b"9" * 5000, "is not JSON"),
        (b"[]", "is not an object with a format number"),
        (b"null", "is not an object with a format number"),
        (b"{}", "is not an object with a format number"),
        (b'{"format": "1"}', "is not an object with a format number"),
        (b'{"format": true}', "is not an object with a format number"),
    ],
)
def test_a_broken_manifest_is_not_a_bundle(bundle: Path, text: bytes, said: str) -> None:
    (bundle / MANIFEST).write_bytes(text)
    message = refusal(bundle)
    assert "is not a bundle" in message
    assert said in message


def test_an_enormous_manifest_is_not_read(bundle: Path) -> None:
    os.truncate(bundle / MANIFEST, 1 << 34)
    assert f"its manifest.json has {1 << 34} bytes" in refusal(bundle)


def test_a_manifest_that_is_a_link_is_refused(bundle: Path) -> None:
    (bundle / MANIFEST).rename(bundle.with_name("elsewhere"))
    (bundle / MANIFEST).symlink_to(bundle.with_name("elsewhere"))
    assert "its manifest.json is not a plain file" in refusal(bundle)


@pytest.mark.parametrize("number", [0, 2, 10**30])
def test_another_format_is_refused_by_name(bundle: Path, number: int) -> None:
    edit(bundle, lambda raw: raw.update(format=number, graphspec_version="9.1.0", invented={"a": 1}))
    assert refusal(bundle) == (
        f"{bundle} was written by graphspec 9.1.0 in bundle format {number}, and this graphspec {__version__} "
        f"reads format 1: install graphspec 9.1.0, or {rebuild(bundle)}"
    )


def test_another_format_need_say_nothing_else(bundle: Path) -> None:
    (bundle / MANIFEST).write_text('{"format": 7}')
    assert refusal(bundle).endswith("install graphspec of unknown version, or build it again")


def test_unknown_fields_are_named_and_laid_to_a_newer_graphspec(bundle: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw.update(rng_algorithm="philox", graphspec_version="0.9.0")
        raw["graphs"][0]["stream"] = 1

    edit(bundle, change, seal=False)
    said = refusal(bundle)
    assert f"has fields that graphspec {__version__} does not know: graphs.0.stream, rng_algorithm." in said
    assert "A newer graphspec probably wrote it (it says 0.9.0): install that version" in said
    assert rebuild(bundle) in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.pop("capacity"), "capacity: Field required"),
        (lambda raw: raw.update(capacity="64"), "capacity: Input should be a valid integer"),
        (lambda raw: raw.update(max_batch_size=True), "max_batch_size: Input should be a valid integer"),
        (lambda raw: raw.update(widths=[0, 1, 2, 3]), "width 3 is more than the 2 drafted tokens"),
        (lambda raw: raw["graphs"][0].update(file="../../etc/passwd"), "graphs.0.file: Value error"),
        (lambda raw: raw.update(architecture="\ud800"), "is invalid"),
        (lambda raw: raw.update(build_command=7), "build_command: Input should be a valid string"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_field(bundle: Path, change: Edit, said: str) -> None:
    edit(bundle, change)
    assert said in refusal(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(max_length=59),
        lambda raw: raw.update(eos_token_ids=[3]),
        lambda raw: raw.update(checksum=""),
        lambda raw: raw.pop("checksum"),
        lambda raw: raw["files"]["graphs/step.onnx"].update(sha256="0" * 64),
    ],
)
def test_a_valid_change_by_hand_is_refused(bundle: Path, change: Edit) -> None:
    edit(bundle, change, seal=False)
    assert f"manifest.json was changed after the bundle was written; {rebuild(bundle)}" in refusal(bundle)


def host(backend: Backend = "onnxruntime", version: str = "1.32.0", *classes: str) -> Host:
    return Host(backend=backend, version=version, device_classes=frozenset(classes or {"x86_64", "x86_64-vnni"}))


@pytest.mark.parametrize("version", ["1.32.0", "1.32", "1.33.1", "2.0"])
def test_a_newer_library_than_the_oldest_named_runs_the_bundle(bundle: Path, version: str) -> None:
    assert open_bundle(bundle, host=host(version=version)).manifest.backend.min_version == "1.32"


def test_an_older_library_is_refused(bundle: Path) -> None:
    said = refusal(bundle, host=host(version="1.31.2"))
    assert "was built for onnxruntime 1.32 or newer, and this server has 1.31.2: install that version" in said
    assert rebuild(bundle) in said


@pytest.mark.parametrize("version", ["1.31.9", "1.32.1", "1.33"])
def test_without_an_oldest_version_only_the_same_one_runs(bundle: Path, version: str) -> None:
    edit(bundle, lambda raw: raw["backend"].update(min_version=None))
    open_bundle(bundle, host=host())
    assert f"onnxruntime exactly 1.32.0, and this server has {version}" in refusal(bundle, host=host(version=version))


def test_another_backend_is_refused(bundle: Path) -> None:
    said = refusal(bundle, host=host("tensorrt", "11.4"))
    assert f"was built for onnxruntime, and this server runs tensorrt; {rebuild(bundle)}" in said


def test_another_device_is_refused(bundle: Path) -> None:
    said = refusal(bundle, host=host("onnxruntime", "1.32.0", "aarch64", "aarch64-dotprod"))
    assert "for device class x86_64, and this machine's are: aarch64, aarch64-dotprod; on this machine, " in said


def test_the_host_is_checked_before_a_file_is_hashed(bundle: Path) -> None:
    (bundle / "graphs/step.onnx").unlink()
    assert "this server runs tensorrt" in refusal(bundle, host=host("tensorrt", "11.4"))


def test_a_sound_bundle_is_a_cache_hit_under_its_own_key(bundle: Path) -> None:
    assert existing_key(bundle) == json.loads((ARTIFACT / MANIFEST).read_text())["key"]


@pytest.mark.parametrize(
    "spoil",
    [
        shutil.rmtree,
        lambda bundle: (bundle / MANIFEST).unlink(),
        lambda bundle: (bundle / "graphs/step.onnx").unlink(),
        lambda bundle: (bundle / "graphs/step.onnx").write_text("x"),
        lambda bundle: (bundle / "graphs/more.onnx").write_text("x"),
        lambda bundle: edit(bundle, lambda raw: raw.update(format=2)),
        lambda bundle: edit(bundle, lambda raw: raw.update(key="0" * 64), seal=False),
    ],
)
def test_an_unsound_bundle_is_no_cache_hit(bundle: Path, spoil: Callable[[Path], object]) -> None:
    spoil(bundle)
    assert existing_key(bundle) is None


def test_equal_inputs_have_equal_keys() -> None:
    one = input_key({"a": [1, 0.1, None], "b": {"x": "é", "y": True}})
    assert one == input_key({"b": {"y": True, "x": "é"}, "a": [1, 0.1, None]})
    text = '{"a":[1,0.1,null],"b":{"x":"\\u00e9","y":true}}'
    assert one == sha256(text.encode()).hexdigest()


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none(), max_size=4))
def test_changed_inputs_have_another_key(parts: dict[str, Any]) -> None:
    assert input_key(parts) != input_key({**parts, "one more": 1})
    for name in parts:
        assert input_key(parts) != input_key({**parts, name: [parts[name]]})


def test_a_key_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        input_key({"rate": float("nan")})


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_files_are_hashed_whole_around_the_block_size(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    entry = hash_file(tmp_path / "file", sync=True)
    assert (entry.size, entry.sha256) == (size, sha256(data).hexdigest())


def test_a_manifest_that_was_not_written_has_no_checksum() -> None:
    raw = json.loads((ARTIFACT / MANIFEST).read_text())
    del raw["checksum"]
    assert Manifest.model_validate(raw).checksum == ""


def test_the_rebuild_command_names_where_the_bundle_lies_now(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = bundle.rename(bundle.with_name("moved here"))
    monkeypatch.chdir(moved.parent)
    (moved / FILES[0]).unlink()
    said = refusal(Path(moved.name))
    program, *args = shlex.split(said.partition("rebuild it with: ")[2])
    assert (program, args[-3:]) == ("graphspec", ["-o", str(moved), "--overwrite"])


@pytest.mark.parametrize("command", ["make bundle", "graphspec build -o", "graphspec 'build", ""])
def test_a_command_that_is_not_ours_is_left_as_it_is(command: str, tmp_path: Path) -> None:
    assert rebuild_command(command, tmp_path) == command
