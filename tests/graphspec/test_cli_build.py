"""`graphspec build`: the bundle it writes, the inputs it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

import graphspec
from graphspec import staging
from graphspec.building import named_anywhere
from graphspec.bundle import read_manifest, verify_bundle
from graphspec.errors import ConfigError

GRAPHSPEC = [sys.executable, "-m", "graphspec"]


def test_one_line_says_what_was_built_and_a_second_build_is_a_cache_hit(
    bundle: Path, build_args: list[str], run: Command
) -> None:
    before = (bundle / "manifest.json").stat().st_ino
    result = run(*build_args)
    assert result.status == 0
    (line,) = result.out.splitlines()
    assert line.startswith(f"{bundle}: UnifiedNgramLlama3ForCausalLM, K 3, widths 0 3, int8, ")
    assert "cached (" in line
    assert (bundle / "manifest.json").stat().st_ino == before


def test_flags_reach_the_bundle(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.widths == (0, 3)
    assert (manifest.max_length, manifest.max_batch_size) == (96, 2)
    chosen = {
        name: manifest.speculative[name] for name in ("speculative_method", "num_speculative_tokens", "ngram_max")
    }
    assert chosen == {"speculative_method": "ngram", "num_speculative_tokens": 3, "ngram_max": 2}


def test_the_recorded_command_builds_the_same_bundle(bundle: Path, run: Command) -> None:
    program, *args = shlex.split(read_manifest(bundle).build_command)
    assert program == "graphspec"
    assert "cached (" in run(*args).out


def test_the_python_function_does_the_same(bundle: Path, checkpoints: Path) -> None:
    stages: list[str] = []
    built = graphspec.build(
        model=checkpoints / "target",
        out=bundle,
        num_speculative_tokens=3,
        ngram_max=2,
        max_length=96,
        max_batch_size=2,
        widths=(0, 3),
        on_stage=stages.append,
    )
    assert built.was_cached
    assert repr(built) == f"Built(UnifiedNgramLlama3ForCausalLM, key {built.manifest.key[:12]}…, was_cached=True)"
    assert stages[0] == "opening checkpoints"
    with pytest.raises(ConfigError, match="num_tokens is not a known setting"):
        graphspec.build(model=checkpoints / "target", out=bundle, num_tokens=3)


@pytest.mark.usefixtures("bundle")
def test_flags_override_the_config_file(build_args: list[str], run: Command, tmp_path: Path) -> None:
    file = tmp_path / "pair.toml"
    file.write_text('[fast]\nspeculative_method = "ngram"\nnum_speculative_tokens = 7\nngram_max = 2\n')
    without = [word for pair in zip(build_args[1::2], build_args[2::2], strict=True) for word in pair]
    at = without.index("--ngram-max")
    rest = without[:at] + without[at + 2 :]
    result = run("build", "--config-file", file, "--section-name", "fast", *rest)
    assert (result.status, result.errors) == (0, [])
    assert "cached (" in result.out


@pytest.mark.usefixtures("bundle")
def test_a_number_of_drafts_in_a_file_without_a_method_is_as_good_as_the_flag(
    build_args: list[str], run: Command, tmp_path: Path
) -> None:
    (tmp_path / "k.json").write_text('{"num_speculative_tokens": 3, "ngram_max": 2}')
    own = {"--num-speculative-tokens", "--ngram-max"}
    pairs = [pair for pair in zip(build_args[1::2], build_args[2::2], strict=True) if pair[0] not in own]
    result = run("build", "--config-file", tmp_path / "k.json", *(word for pair in pairs for word in pair))
    assert (result.status, result.errors) == (0, [])
    assert "cached (" in result.out


@pytest.mark.parametrize("method", [None, "eagle"])
@pytest.mark.parametrize("settings", [{"ngram_max": 2}, {"ngram_min": 1}, {"ngram_max": 3, "ngram_min": 2}], ids=str)
def test_settings_of_another_method_are_refused_by_the_architectures_name_wherever_they_stand(
    checkpoints: Path, tmp_path: Path, run: Command, settings: dict[str, int], method: str | None
) -> None:
    (tmp_path / "file.json").write_text(json.dumps(settings))
    flags = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
    pair = ["--model", checkpoints / "target", "--draft-model-path", checkpoints / "eagle", "-o", tmp_path / "out"]
    pair += ["--speculative-method", method] if method else []
    by_flag, by_file = run("build", *pair, *flags), run("build", *pair, "--config-file", tmp_path / "file.json")
    (line,) = by_flag.errors
    assert (by_flag.status, by_file.status, by_file.errors) == (1, 1, [line])
    for name in settings:
        said = f"--{name.replace('_', '-')} is not supported by architecture UnifiedEagleLlama3ForCausalLM (it is for"
        assert said in line


@pytest.mark.slow
def test_the_recorded_command_holds_in_any_folder_and_after_a_move(
    checkpoints: Path, tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoints)
    out = os.path.relpath(tmp_path / "out", checkpoints)
    result = run("build", "--model", "target", "-o", out, "--widths", "0", "--max-length", "32")
    assert result.status == 0, result.err
    work = ["loading torch", "loading weights", "tracing", "translating the trace to ONNX"]
    assert [stage for stage in stages_of(result.err) if stage in work] == work  # each may take many seconds
    assert "writing the portable graph of width 0" in stages_of(result.err)
    monkeypatch.chdir(tmp_path)
    _, *args = shlex.split(read_manifest(tmp_path / "out").build_command)
    assert str(checkpoints / "target") in args
    assert "cached (" in run(*args).out
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "moved" / "weights" / "model.safetensors").unlink()
    (line,) = run("verify", "moved").errors
    _, *args = shlex.split(line.partition("rebuild it with: ")[2])
    monkeypatch.chdir("/")
    assert run(*args).status == 0
    assert run("verify", tmp_path / "moved").status == 0
    assert not (tmp_path / "out").exists()


def test_a_hub_id_is_recorded_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_anywhere("org/model") == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert named_anywhere("org/model") == str(tmp_path / "org" / "model")
    assert named_anywhere(Path("org")) == str(tmp_path / "org")


def stages_of(err: str) -> list[str]:
    return [line.partition("] ")[2] for line in err.splitlines() if line.startswith("[")]


def test_a_place_that_is_no_bundle_is_refused_before_anything_is_read(
    checkpoints: Path, tmp_path: Path, run: Command
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for more in ([], ["--overwrite"]):
        result = run("build", "--model", checkpoints / "target", "-o", tmp_path, *more)
        assert (result.status, stages_of(result.err)) == (1, [])
        said = (
            f"error: {tmp_path} exists and is not a bundle: it has no manifest.json; choose another place, or move it"
        )
        assert result.errors == [f"{said} away"]


@pytest.mark.parametrize("flags", ["--encoding float32", "--max-length 300", "--max-length 257 --overwrite"])
def test_what_can_be_known_early_is_told_before_torch_is_loaded(
    build_args: list[str], run: Command, flags: str, bundle: Path
) -> None:
    at = build_args.index("--max-length")
    args = build_args[:at] + build_args[at + 2 :] if "--max-length" in flags else build_args
    result = run(*args, *flags.split())
    assert result.status == 1
    assert "loading torch" not in stages_of(result.err)
    verify_bundle(bundle)


def test_a_place_for_passes_that_cannot_be_written_is_told_before_anything_is_read(
    checkpoints: Path, tmp_path: Path, run: Command
) -> None:
    (tmp_path / "file").write_text("mine")
    args = ["build", "--model", checkpoints / "target", "-o", tmp_path / "out"]
    result = run(*args, "--dump-passes", tmp_path / "file" / "passes")
    assert (result.status, stages_of(result.err)) == (1, [])
    said = (
        f"error: --dump-passes {tmp_path}/file/passes cannot be written: {tmp_path}/file: not a folder; choose another"
    )
    assert result.errors == [f"{said} folder"]
    assert not (tmp_path / "out").exists()


def test_other_inputs_never_overwrite_a_bundle_unasked(bundle: Path, build_args: list[str], run: Command) -> None:
    result = run(*build_args, "--encoding", "float32")
    assert result.status == 1
    (line,) = result.errors
    assert line == f"error: {bundle} exists: pass --overwrite to replace it, or choose another place"
    assert read_manifest(bundle).encoding == "int8"


def corrupt_header(folder: Path) -> Path:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:8] + b"{nonsense" + content[17:])
    return folder


def truncated_gguf(folder: Path) -> Path:
    path = folder.with_suffix(".gguf")
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 12, 20))
    return path


def not_a_checkpoint(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing here")
    return folder


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: folder / "missing", "no such file or directory"),
        (not_a_checkpoint, "config.json"),
        (corrupt_header, "model.safetensors"),
        (truncated_gguf, "is truncated or damaged"),
    ],
    ids=["wrong path", "not a checkpoint", "corrupt safetensors header", "truncated GGUF"],
)
def test_a_damaged_checkpoint_is_one_line_and_leaves_nothing(
    damage: Callable[[Path], Path], said: str, checkpoints: Path, tmp_path: Path, run: Command
) -> None:
    model = damage(Path(shutil.copytree(checkpoints / "target", tmp_path / "model")))
    result = run("build", "--model", model, "-o", tmp_path / "new" / "out")
    assert (result.status, result.out) == (1, "")
    (line,) = result.errors
    assert line.startswith("error: ")
    assert said in line
    assert model.name in line
    assert not (tmp_path / "new").exists()


def test_mismatched_vocabularies_are_named_with_both_sizes(checkpoints: Path, tmp_path: Path, run: Command) -> None:
    import tiny

    draft = tiny.save_llama(tmp_path / "draft", layers=1, vocab_size=120)
    result = run("build", "--model", checkpoints / "target", "--draft-model-path", draft, "-o", tmp_path / "out")
    assert result.status == 1
    (line,) = result.errors
    assert "128" in line
    assert "120" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--arch UnifiedNgramLlama2ForCausalLM", "did you mean UnifiedNgramLlama3ForCausalLM?"),
        ("--arch-module no.such", "there is no module of that name"),
        ("--backend tensorrt", "building needs tensorrt"),
        ("--backend tensorrt-rtx --encoding float32", "encoding 'float32' is not available on backend 'tensorrt-rtx'"),
        ("--backend cuda", "backend 'cuda' is not known"),
        ("--bake-weights", "--bake-weights is for engines"),
        (
            "--encoding bfloat16",
            "encoding 'bfloat16' is not available on backend 'onnxruntime'; use int8, int4 or float32",
        ),
        ("--encoding fp8", "encoding 'fp8' is not available on backend 'onnxruntime'"),
        ("--encoding int3", "encoding 'int3' is not known"),
        ("--max-batch-size 0", "--max-batch-size 0: it must be at least 1"),
        ("--max-length 1", "--max-length 1"),
        ("--max-length 9999", "--max-length 9999 is more than the 256 tokens"),
        ("--num-speculative-tokens-per-batch-size 3", '3 is not a list of ranges; write it as [{"batch_start"'),
        ("--widths 0,9", "--widths 9 is outside 0 … 4"),
        ("--num-speculative-tokens 0", "`graphspec generate --no-speculation`"),
        ("--num-speculative-tokens many", "num_speculative_tokens: input should be a valid integer"),
        ("--speculative-method beagle", "speculative_method: input should be 'eagle'"),
        ("--speculative-method mtp", "no registered architecture serves"),
        ("--speculative-method ngram --ngram-min 3 --ngram-max 2", "are not a range"),
        ("--synthetic-acceptance-rate 0.5", "is not supported by architecture UnifiedNgramLlama3ForCausalLM"),
        ("--draft-proposal sampled", "--draft-proposal is not supported by architecture"),
        ("--logit-penalties", "--logit-penalties is not supported by architecture"),
        ("--config-file nowhere.toml", "cannot read nowhere.toml"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_one_line(
    flags: str, said: str, checkpoints: Path, tmp_path: Path, run: Command
) -> None:
    result = run("build", "--model", checkpoints / "target", *flags.split(), "-o", tmp_path / "out")
    assert (result.status, result.out) == (1, "")
    (line,) = result.errors
    assert line.startswith("error: ")
    assert said in line
    assert os.listdir(tmp_path) == []


def test_an_architecture_module_of_the_current_folder_is_found(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house_arch.py").write_text("ARCHITECTURES = ()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    assert run("archs", "--arch-module", "house_arch").status == 0
    assert sys.path == before


def test_without_the_build_libraries_one_line_says_what_to_install(checkpoints: Path, tmp_path: Path) -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from graphspec.cli import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "build", "--model", str(checkpoints / "target"), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "error: building needs torch, onnx, which this installation leaves out: "
        "pip install 'graphspec-llm[build,cpu]'\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["tracing", "writing weights"])
def test_ctrl_c_in_the_middle_of_a_build_leaves_nothing(stage: str, checkpoints: Path, tmp_path: Path) -> None:
    command = [*GRAPHSPEC, "build", "--model", str(checkpoints / "target"), "-o", str(tmp_path / "new" / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        assert any(stage in line for line in build.stderr), "the build ended before that stage"
        build.send_signal(signal.SIGINT)
        out, err = build.communicate(timeout=60)
    assert (build.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stage", "said"),
    [(signal.SIGTERM, "tracing", "terminated"), (signal.SIGHUP, "loading torch", "hung up")],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_other_signals_that_end_a_build_leave_nothing_either(
    number: signal.Signals, stage: str, said: str, checkpoints: Path, tmp_path: Path
) -> None:
    command = [*GRAPHSPEC, "build", "--model", str(checkpoints / "target"), "-o", str(tmp_path / "new" / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        assert any(stage in line for line in build.stderr), "the build ended before that stage"
        build.send_signal(number)
        build.send_signal(number)  # senders repeat themselves
        out, err = build.communicate(timeout=60)
    assert (build.returncode, out, err.splitlines()[-1]) == (128 + number, "", said)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_passes_that_are_asked_for_are_written_although_the_bundle_is_there(
    build_args: list[str], run: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    args = [*build_args[:-1], out]
    assert run(*args).status == 0
    key = read_manifest(out).key
    result = run(*args, "--dump-passes", tmp_path / "passes")
    assert (result.status, result.errors) == (0, [])
    assert "built in" in result.out
    assert len(os.listdir(tmp_path / "passes")) > 5
    assert verify_bundle(out).key == key
    assert "cached (" in run(*args).out


@pytest.mark.slow
def test_the_slower_of_two_equal_builds_has_the_faster_ones_bundle(
    build_args: list[str], run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    args = [*build_args[:-1], out]
    commit = staging.Stage.commit

    def overtaken(stage: staging.Stage, fields: Mapping[str, object], **options: Any) -> Any:
        monkeypatch.undo()
        assert "built in" in run(*args).out
        return commit(stage, fields, **options)

    monkeypatch.setattr(staging.Stage, "commit", overtaken)
    result = run(*args)
    assert (result.status, result.errors) == (0, [])
    assert "cached (" in result.out
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-speculative-tokens 100000 --max-length 10", "num_speculative_tokens must be at most 128, got 100000"),
        (
            "--num-speculative-tokens 10 --max-length 10",
            "--num-speculative-tokens 10: a request of this bundle has 10 tokens at most (--max-length), so no more "
            "than one fewer can be drafted",
        ),
    ],
)
def test_more_drafts_than_could_ever_be_used_are_refused_before_any_work(
    checkpoints: Path, tmp_path: Path, run: Command, flags: str, said: str
) -> None:
    result = run("build", "--model", checkpoints / "target", "-o", tmp_path / "out", *flags.split())
    assert (result.status, result.errors) == (1, [f"error: {said}"])
    assert not any("reading" in line for line in result.err.splitlines())
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("limit", [20, 300], ids=["small", "in the middle"])
def test_a_limit_on_the_size_of_files_is_one_line_that_names_the_bundle(
    limit: int, checkpoints: Path, tmp_path: Path
) -> None:
    words = [
        *GRAPHSPEC,
        "build",
        "--model",
        checkpoints / "target",
        "--encoding",
        "float32",
        "-o",
        tmp_path / "new/out",
    ]
    limited = ["sh", "-c", 'ulimit -f "$1"; shift; exec "$@"', "sh", str(limit)]
    done = subprocess.run([*limited, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path / 'new/out'} cannot be written: a file of it is larger than this process")
    assert os.listdir(tmp_path) == []


SMALL_DISK = """
set -e
mount -t tmpfs -o size="$1" tmpfs "$2"
shift; disk="$1"; shift
status=0
"$@" || status=$?
ls -A "$disk"
exit $status
"""


def on_small_disk(size: int, disk: Path, command: list[object]) -> subprocess.CompletedProcess[str]:
    """Runs a command with a file system of `size` bytes at `disk`, then lists what is left there."""
    disk.mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "mount -t tmpfs tmpfs /mnt"]).returncode:
        pytest.skip("this system lets no ordinary user mount a file system")
    words = [*unshare, SMALL_DISK, "sh", str(size), str(disk), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "traced"),
    [(64 << 10, False), (0, True)],
    ids=["before the work", "in the middle"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(size: int, traced: bool, checkpoints: Path, tmp_path: Path) -> None:
    target = checkpoints / "target"
    # Float32 weights fill a disk of their own size; the graphs do not fit beside them.
    size = size or (target / "model.safetensors").stat().st_size + (16 << 10)
    disk = tmp_path / "disk"
    command = [*GRAPHSPEC, "build", "--model", target, "--encoding", "float32", "-o", disk / "out"]
    done = on_small_disk(size, disk, command)
    assert (done.returncode, done.stdout) == (1, "")
    *progress, line = done.stderr.splitlines()
    assert line.startswith(f"error: disk full: {disk}/out cannot be written")
    assert any(shown.endswith("] tracing") for shown in progress) is traced
