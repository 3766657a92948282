"""docs/deploying.md: its commands run, what it quotes is what the code says, and it says what has not run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import pytest
import tiny
from documented import serving

from graphspec.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deploying.md").read_text()
HOLE = "…"


def lines(language: str) -> list[str]:
    text = "\n".join(re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def missing(command: str) -> str | None:
    """The program or library that a command needs and this machine lacks."""
    if "--backend tensorrt-rtx" in command and importlib.util.find_spec("tensorrt_rtx") is None:
        return "tensorrt_rtx"
    program = shlex.split(command)[0]
    return None if program == "graphspec" or shutil.which(program) else program


@pytest.mark.slow
def test_the_commands_run_in_order(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path / "target", layers=3)
    tiny.save_eagle(tmp_path / "eagle-draft")
    commands = [line for line in lines("sh") if not line.startswith("pip")]
    assert len(commands) == 13
    for command in commands:
        if missing(command):
            continue
        if command.startswith("graphspec run"):
            with serving(command, tmp_path) as port, urlopen(f"http://127.0.0.1:{port}/health") as answer:
                assert answer.status == 200
            continue
        ours = f"{sys.executable} -m {command}" if command.startswith("graphspec") else command
        run = subprocess.run(ours, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"


def test_what_does_not_run_on_a_cpu_is_understood_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("graphspec.building._is_installed", lambda name: name != "tensorrt")
    commands = lines("console")
    assert [shlex.split(command)[0] for command in commands] == ["graphspec", "rsync"]
    assert main(shlex.split(commands[0])[1:]) == 1
    assert "building needs tensorrt, which" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_installed_are_extras_of_this_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = [shlex.split(line, comments=True) for line in lines("sh") if line.startswith("pip")]
    assert installs
    for _, _, wanted in installs:
        name, _, extras = wanted.rstrip("]").partition("[")
        assert name == project["name"]
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


@cache
def texts() -> tuple[str, ...]:
    """Every string of the code, with a hole for each value that an f-string fills in."""
    found = []
    for folder in ("graphspec", "export", "runtime"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def quoted() -> list[str]:
    table = PAGE.partition("## What a change means")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[-1].rstrip(" |") for row in table.splitlines() if row.startswith("| ")]
    return [cell.strip("`") for cell in cells if cell.startswith("`")]


def test_the_table_quotes_every_kind_of_refusal() -> None:
    assert len(quoted()) == 22


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_that_the_code_says(message: str) -> None:
    assert any(message in text for text in texts()), message


def test_what_has_not_run_is_called_that() -> None:
    assert "**no engine has run on a GPU yet**" in PAGE
    assert all("(not run)" in line for line in PAGE.splitlines() if line.startswith("pip") and "gpu" in line)
