"""Every command and program in README.md runs, on tiny checkpoints under the names it uses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    tiny.save_llama(path / "target", layers=3)
    tiny.save_eagle(path / "eagle-draft")
    return path


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("graphspec")]


@pytest.mark.slow
def test_the_commands_and_programs_run_in_order(folder: Path) -> None:
    answers = []
    for command in commands():
        executable = f"{sys.executable} -m {command}"
        run = subprocess.run(executable, shell=True, cwd=folder, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        if "--seed 7" in command:
            answers.append(run.stdout)
    assert len(answers) == 2
    assert answers[0] == answers[1], "the README says that these print the same text"
    for program in blocks("python"):
        run = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr


def test_only_installs_and_graphspec_commands_are_shown() -> None:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    assert all(line.startswith(("pip install", "graphspec")) for line in lines if line)


def test_the_make_targets_exist() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_table_of_architectures_is_the_registry() -> None:
    from graphspec.registry import registered

    shown = re.findall(r"^\| (Unified\w+) \|", README, re.M)
    assert shown == [architecture.name for architecture in registered()]
