"""The command line as a whole: its options, what it imports, and what becomes of errors."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import Command
from pydantic import BaseModel, ConfigDict

import graphspec
from graphspec.cli import COMMANDS, application
from graphspec.cli.errors import UsageError, guarded
from graphspec.errors import CheckpointError, ConfigError
from graphspec.machinery import unsupported
from graphspec.registry import registered
from graphspec.speculative_config import SpeculativeConfig

SETTINGS = " ".join("--" + name.replace("_", "-") for name in SpeculativeConfig.model_fields)
OPTIONS = {
    "build": f"{SETTINGS} --no-use-relaxed-acceptance-for-thinking --no-use-greedy-acceptance --no-logit-penalties "
    "--model --draft-model-path --arch --arch-module --backend --device --encoding --max-length --max-batch-size "
    "--widths --bake-weights --config-file --section-name --dump-passes --overwrite -o --out",
    "generate": "BUNDLE --prompt --prompt-file --chat --raw --system --max-new-tokens --min-tokens --temperature "
    "--top-k --top-p --min-p --seed --stop --stop-token-id --ignore-eos --width --no-speculation --max-batch-size "
    "--threads --no-verify --require-signature --json",
    "distill": "--model -o --out --method --draft-model-path --data --self-synthesize --work-dir --seed "
    "--draft-vocab-size --draft-intermediate-size --draft-layers --anchors --depth --epochs --batch-size "
    "--learning-rate --precision --max-new-tokens --max-length --held-out-share --measured-prompts --rows "
    "--workers --threads --overwrite",
    "run": "BUNDLE --host --port --api-key --served-model-name --max-batch-size --max-queue-size --request-timeout "
    "--drain-seconds --prefix-store-mb --tool-call-parser --enable-auto-tool-choice --reasoning-parser "
    "--width --no-overlap --threads --no-verify --require-signature",
    "bench": "BUNDLE --dataset --category --num-prompts --max-new-tokens --batch --widths "
    "--synthetic-acceptance-rate --temperature --threads --no-verify --require-signature --plot --json",
    "inspect": "BUNDLE --json",
    "verify": "BUNDLE --require-signature",
    "sign": "BUNDLE --key --generate-key",
    "archs": "--arch-module --json",
    "resolve": "--model --draft-model-path --speculative-method --arch --arch-module --json",
}


def parameters(command: str) -> list[Any]:
    group: Any = typer.main.get_command(application(command))
    found: list[Any] = group.commands[command].params
    return found


def fresh(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_exactly_these_options(command: str) -> None:
    options = {
        name
        for parameter in parameters(command)
        for name in ([parameter.metavar] if parameter.param_type_name == "argument" else [*parameter.opts])
        + [*parameter.secondary_opts]
    }
    assert options == {*OPTIONS[command].split(), "--debug"}


def test_every_option_says_what_it_is() -> None:
    silent = [
        parameter.opts[0]
        for command in COMMANDS
        for parameter in parameters(command)
        if parameter.param_type_name == "option" and not parameter.help
    ]
    assert silent == []


def test_build_help_is_in_panels_and_marks_what_no_architecture_supports(run: Command) -> None:
    help_text = run("build", "--help").out
    panels = [line for line in help_text.splitlines() if line and not line.startswith((" ", "Usage"))]
    assert panels == ["Pair:", "Speculation:", "Numerics and limits:", "Output:", "Other:"]
    marked = {name for name in SpeculativeConfig.model_fields if "not supported by any" in described("build", name)}
    assert marked == unsupported(registered()).keys()
    assert "(sampled: not supported by any architecture yet)" in described("build", "draft_proposal")
    assert max(map(len, help_text.splitlines())) <= 90  # nothing is cut short, little wraps


def described(command: str, option: str) -> str:
    """What --help says of an option, on one line."""
    (parameter,) = (parameter for parameter in parameters(command) if parameter.name == option)
    return str(parameter.help)


def test_every_option_of_generate_has_a_panel_and_limits_are_told() -> None:
    without = [p.opts[0] for p in parameters("generate") if p.param_type_name == "option" and not p.rich_help_panel]
    assert without == ["--debug"]
    assert "key/value heads" in described("generate", "threads")
    assert "nothing else there" in described("generate", "as_json")
    assert "disables" not in described("build", "speculative_method")
    assert '[{"batch_start": 1' in described("build", "num_speculative_tokens_per_batch_size")


def test_a_broken_plug_in_does_not_take_the_help_away(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> tuple[()]:
        raise ImportError("no module of that name")

    monkeypatch.setattr("graphspec.registry.registered", broken)
    monkeypatch.delitem(sys.modules, "graphspec.cli.build")
    assert "--num-speculative-tokens" in run("build", "--help").out


def test_help_loads_no_backend_no_torch_and_no_model() -> None:
    code = "import sys; from graphspec.cli import main; main(['--help']); print(*sys.modules)"
    *text, modules = fresh(code).splitlines()
    assert any(line.split()[:1] == ["build"] for line in text)
    heavy = {"torch", "onnxruntime", "onnx", "numpy", "tokenizers", "graphspec.speculative_config"}
    assert heavy.isdisjoint(modules.split())


def test_importing_graphspec_loads_no_backend_and_no_torch() -> None:
    modules = fresh("import sys, graphspec; print(*sys.modules)").split()
    assert {"torch", "onnxruntime", "numpy", "pydantic"}.isdisjoint(modules)


def test_every_public_name_is_there_and_listed() -> None:
    assert {name: getattr(graphspec, name).__name__ for name in graphspec.__all__} == {
        name: name for name in graphspec.__all__
    }
    assert set(graphspec.__all__) <= set(dir(graphspec))
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        graphspec.lode  # type: ignore[attr-defined] # noqa: B018


def test_version_is_the_packages(run: Command) -> None:
    assert run("--version").out == f"graphspec {graphspec.__version__}\n"


def test_no_command_shows_help_and_is_a_usage_error(run: Command) -> None:
    result = run()
    assert result.status == 2
    assert "Commands:" in result.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["bulid"], "No such command 'bulid'"),
        (["archs", "--jason"], "No such option: --jason"),
        (["build", "-o", "x"], "Missing option '--model'"),
        (["run", "x", "--api-key"], "requires an argument; see graphspec run --help"),
        (["inspect"], "Missing argument 'BUNDLE'"),
        (["generate", "x", "--prompt", "a", "--top-k", "many"], "Invalid value for '--top-k'"),
        (["generate", "x"], "no prompt"),
        (["generate", "x", "--prompt", "-", "--prompt-file", "-"], "one prompt only"),
        (["generate", "x", "--prompt", "a", "--width", "1", "--no-speculation"], "give one of the two"),
        (["build", "--model", "x", "-o", "x", "--widths", "0,x"], "not a list of numbers"),
        (["build", "--model", "x", "-o", "x", "--section-name", "s"], "--config-file"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(run: Command, args: list[str], said: str) -> None:
    result = run(*args)
    assert (result.status, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert said in line


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def wrapped_interrupt() -> int:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise RuntimeError("tracing failed") from error


def invalid() -> int:
    return Strict.model_validate({"count": "many", "other": 1}).count


@pytest.mark.parametrize(
    ("run", "status", "line"),
    [
        (raising(ConfigError("no such\nwidth \x1b[1m")), 1, r"error: no such width \x1b[1m"),
        (raising(UsageError("give one")), 2, "error: give one"),
        (raising(KeyboardInterrupt()), 130, "interrupted"),
        (wrapped_interrupt, 130, "interrupted"),
        (raising(OSError(errno.ENOSPC, "No space left on device", "out")), 1, "error: out: disk full"),
        (raising(OSError(errno.EACCES, "Permission denied", "a")), 1, "error: a: Permission denied"),
        (raising(MemoryError()), 1, "error: out of memory: MemoryError"),
        (
            raising(ModuleNotFoundError("No module named 'torch'", name="torch.nn")),
            1,
            "error: this needs torch.nn, which is not installed: pip install 'graphspec-llm[build,cpu]'",
        ),
        (
            raising(ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")),
            1,
            "error: this needs onnxruntime, which is not installed: pip install 'graphspec-llm[cpu]'",
        ),
        (
            raising(ModuleNotFoundError("No module named 'house.rope'", name="house.rope")),
            1,
            "error: this needs house.rope, which is not installed",
        ),
        (
            raising(ModuleNotFoundError("No module named 'graphspec.nothing'", name="graphspec.nothing")),
            1,
            "internal error: ModuleNotFoundError: No module named 'graphspec.nothing' (run with --debug for the "
            "traceback)",
        ),
        (
            raising(ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")),
            1,
            "error: this needs uvicorn, which is not installed: pip install 'graphspec-llm[serve]'",
        ),
        (
            raising(ValueError("first\nsecond")),
            1,
            "internal error: ValueError: first second (run with --debug for the traceback)",
        ),
        (raising(AssertionError()), 1, "internal error: AssertionError (run with --debug for the traceback)"),
        (
            invalid,
            1,
            "internal error: ValidationError of Strict: count: Input should be a valid integer, unable to parse string "
            "as an integer; other: Extra inputs are not permitted (run with --debug for the traceback)",
        ),
    ],
)
def test_every_error_is_one_line(
    run: Callable[[], int], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(run, debug=False) == status
    assert capsys.readouterr().err == line + "\n"


def test_a_note_on_a_foreign_error_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    error = ImportError("no name 'x'")
    error.add_note("while importing my.arch")
    guarded(raising(error), debug=False)
    assert "(while importing my.arch; run with --debug" in capsys.readouterr().err


def test_a_library_that_a_plug_in_lacks_is_told_with_the_plug_in(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plug_in.py").write_text("import nothing_there\n")
    result = run("archs", "--arch-module", "my_plug_in")
    assert (result.status, result.errors) == (
        1,
        [
            "error: this needs nothing_there, which is not installed "
            "(while importing the architecture declarations of my_plug_in)"
        ],
    )


@pytest.mark.parametrize("args", [["--debug", "inspect", "nowhere"], ["inspect", "nowhere", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(run: Command, args: list[str]) -> None:
    result = run(*args)
    assert result.status == 1
    assert result.err.startswith("Traceback")
    assert result.err.splitlines()[-1].startswith("error: nowhere is not a bundle")


def test_without_debug_there_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(CheckpointError("broken")), debug=False) == 1
    assert capsys.readouterr().err == "error: broken\n"


def test_a_reader_that_left_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "graphspec", "archs"]
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")
