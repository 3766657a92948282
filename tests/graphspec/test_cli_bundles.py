"""`graphspec inspect`, `verify`, `archs` and `resolve`, and progress on a terminal."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from command_line import Command

from graphspec.bundle import read_manifest
from graphspec.cli.progress import stages
from graphspec.registry import registered


def test_inspect_shows_what_the_manifest_says(bundle: Path, run: Command) -> None:
    rows = dict(line.split("  ", 1) for line in run("inspect", bundle).out.splitlines())
    rows = {label.strip(): value.strip() for label, value in rows.items()}
    assert rows["architecture"] == "UnifiedNgramLlama3ForCausalLM"
    assert rows["widths"] == "0, 3"
    assert rows["rebuild with"] == read_manifest(bundle).build_command + " --overwrite"


def test_inspect_prints_the_manifest_as_json(bundle: Path, run: Command) -> None:
    assert json.loads(run("inspect", bundle, "--json").out) == json.loads((bundle / "manifest.json").read_text())


def test_verify_names_each_file_it_reads_and_says_that_all_are_sound(bundle: Path, run: Command) -> None:
    files = read_manifest(bundle).files
    result = run("verify", bundle)
    assert result.status == 0
    assert result.out == f"{bundle}: {len(files)} files, all as they were written\n"
    assert all(any(f"hashing {file} (" in line for line in result.err.splitlines()) for file in files)


def test_verify_names_everything_that_is_wrong(bundle: Path, tmp_path: Path, run: Command) -> None:
    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    (damaged / "tokenizer" / "tokenizer.json").unlink()
    (damaged / "graphs" / "any.onnx").write_bytes(b"x")
    (damaged / "notes.txt").write_text("mine")
    result = run("verify", damaged)
    assert (result.status, result.out) == (1, "")
    (line,) = result.errors
    for problem in ("tokenizer/tokenizer.json is missing", "graphs/any.onnx has 1 bytes", "notes.txt is not in"):
        assert problem in line


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_bundle_is_one_line(command: str, tmp_path: Path, run: Command) -> None:
    result = run(command, tmp_path)
    assert result.status == 1
    assert result.errors == [f"error: {tmp_path} is not a bundle: it has no manifest.json"]


def test_archs_lists_every_architecture_and_what_it_needs(run: Command) -> None:
    head, *lines = run("archs").out.splitlines()
    assert head.split()[:4] == ["name", "target", "drafter", "methods"]
    assert [line.split()[0] for line in lines] == [architecture.name for architecture in registered()]
    entries = {entry["name"]: entry for entry in json.loads(run("archs", "--json").out)}
    assert entries["UnifiedEagle3Llama3ForCausalLM"] == {
        "name": "UnifiedEagle3Llama3ForCausalLM",
        "target": "llama3",
        "drafter": "eagle3",
        "methods": ["eagle3", "eagle"],
        "draft_checkpoint": True,
        "default_num_speculative_tokens": 2,
        "capabilities": ["greedy_acceptance", "logprobs"],
    }


def test_resolve_names_the_architecture_and_the_k_it_would_use(checkpoints: Path, run: Command) -> None:
    target, draft = checkpoints / "target", checkpoints / "eagle"
    assert run("resolve", "--model", target, "--draft-model-path", draft).out == (
        f"UnifiedEagleLlama3ForCausalLM\ntarget  {target} (llama3)\ndraft   {draft} (eagle)\nmethod  eagle, K 2\n"
    )
    assert json.loads(run("resolve", "--model", target, "--speculative-method", "ngram", "--json").out) == {
        "architecture": "UnifiedNgramLlama3ForCausalLM",
        "method": "ngram",
        "num_speculative_tokens": 4,
        "target": {"name": str(target), "kind": "llama3"},
        "draft": None,
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--speculative-method eagle", "give the draft with --draft-model-path"),
        ("--speculative-method beagle", "speculative_method: input should be 'eagle'"),
        ("--arch UnifiedNgramQwen3ForCausalLM", "UnifiedNgramQwen3ForCausalLM does not serve"),
    ],
)
def test_a_pair_that_does_not_resolve_is_one_line(checkpoints: Path, run: Command, flags: str, said: str) -> None:
    result = run("resolve", "--model", checkpoints / "target", *flags.split())
    assert (result.status, result.out) == (1, "")
    (line,) = result.errors
    assert said in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_moves_and_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stages() as stage:
        stage("tracing [bold]")
    shown = terminal.getvalue()
    assert "tracing [bold]" in shown
    assert shown.endswith("\x1b[2K")  # the line is erased


def test_elsewhere_every_stage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with stages() as stage:
        stage("tracing")
        stage("hashing")
    assert [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()] == ["tracing", "hashing"]
