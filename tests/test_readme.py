"""Every command and program in README.md runs, on tiny checkpoints under the names it uses."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import tiny
from documented import serving

from graphspec.backends import BACKENDS
from graphspec.bundle import read_manifest
from graphspec.cli import main
from graphspec.manifest import Role, summary

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ARTIFACT = Path(__file__).parent / "graphspec" / "artifacts" / "format-1"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    tiny.save_llama(path / "target", layers=3)
    (path / "target" / "chat_template.jinja").write_text("{{ messages[-1].content }}:")
    tiny.save_eagle(path / "eagle-draft")
    return path


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("graphspec")]


@pytest.mark.slow
def test_the_commands_and_programs_run_in_order(folder: Path) -> None:
    answers = []
    (server,) = (command for command in commands() if command.startswith("graphspec run"))
    for command in commands():
        if command == server:
            continue
        executable = f"{sys.executable} -m {command}"
        run = subprocess.run(executable, shell=True, cwd=folder, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        if "--seed 7" in command:
            answers.append(run.stdout)
    assert len(answers) == 2
    assert answers[0] == answers[1], "the README says that these print the same text"
    with serving(server, folder) as port:
        for program in blocks("python"):
            words = [sys.executable, "-c", program.replace(":8000", f":{port}")]
            run = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
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


def test_the_settings_name_the_backends_and_what_each_computes_in() -> None:
    (backends,) = re.findall(r"^\| `--backend (.*?) \|", README, re.M)
    assert re.findall(r"[a-z-]+(?=`)", backends) == list(BACKENDS)
    shown = {
        name: encodings
        for names, encodings in re.findall(r"^\| `--encoding` for (.*?): (.*?) \|", README, re.M)
        for name in re.findall(r"`(.*?)`", names)
    }
    assert shown.keys() == BACKENDS.keys()
    for name, encodings in shown.items():
        assert tuple(re.findall(r"`(.*?)`", encodings)) == BACKENDS[name].encodings
        assert encodings.startswith(f"`{BACKENDS[name].encodings[0]}` (default)")


def test_the_fields_of_requests_are_those_of_the_server() -> None:
    from graphspec.runtime.server.schemas import REFUSED, ChatBody, CompletionBody, GenerationBody

    rows = dict(re.findall(r"^\| ([a-z ,]+) \| ([^;|]*`.*?) \|$", README.partition("| field of a request |")[2], re.M))
    shown = {name: re.findall(r"`(\w+)`", fields.partition(";")[0]) for name, fields in rows.items()}
    shared = set(GenerationBody.model_fields)
    assert set(shown["of both"]) == shared
    assert set(shown["of a chat"]) == set(ChatBody.model_fields) - shared
    assert set(shown["of a completion"]) == set(CompletionBody.model_fields) - shared
    assert set(shown["refused, unless they ask for nothing"]) == set(REFUSED)
    known = shared.union(ChatBody.model_fields, CompletionBody.model_fields, REFUSED, {"best_of"})
    assert known.isdisjoint(shown["ignored"])


def test_the_endpoints_are_those_of_the_server() -> None:
    from graphspec.runtime.server.openapi import openapi

    table = README.partition("| endpoint | |")[2].partition("\n\n")[0]
    shown = set(re.findall(r"`(?:GET |POST )?(/[\w/.]+)`", table))
    paths = set(openapi(with_key=False, vocabulary=None)["paths"])
    assert shown == paths - {"/v1/models/{name}"}


def glossary() -> set[str]:
    text = README.partition("## Glossary")[2].partition("\n## ")[0]
    return set(re.findall(r"\*([a-z ]+)\*", text))


def test_every_term_that_inspect_prints_is_in_the_glossary() -> None:
    manifest = read_manifest(ARTIFACT)
    labels = {label for label, _ in summary(manifest)} | {"rebuild with"}
    words = {"capacity", "dynamic", "sampling", "greedy", *get_args(Role)}
    assert labels | words <= glossary()


def test_the_license_is_the_one_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    (file,) = project["license-files"]
    text = (ROOT / file).read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def recipe(target: str) -> list[list[str]]:
    """The commands that `make` would run for a target in a fresh checkout, as words."""
    # MAKEFLAGS of a `make test` around this would be taken for this make's own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "VENV=.no-such-venv", "DEMO=.no-such-demo", target]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return [shlex.split(line, comments=True) for line in done.stdout.replace("\\\n", " ").splitlines()]


def test_the_demo_is_commands_that_the_command_line_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """All but the model is there to the parsers: what fails is opening it."""
    ours = [words for words in recipe("demo") if words and Path(words[0]).name == "graphspec"]
    assert [words[1] for words in ours] == ["build", "generate"]
    for words, missing in zip(
        ours, ("no such file or directory: .no-such-demo/", ".no-such-demo/bundle is not"), strict=True
    ):
        assert main(words[1:]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"error: {missing}")
    out = ours[0][ours[0].index("-o") + 1]
    assert ours[1][2] == out, "what is built is what answers"


def installs() -> list[list[str]]:
    lines = "\n".join([*blocks("sh"), *re.findall(r"`(pip install [^`]+)`", README)]).splitlines()
    shown = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pip install")]
    return [*shown, *([*words[3:]] for words in recipe("demo") if words[1:4] == ["-m", "pip", "install"])]


def test_what_is_installed_are_extras_of_this_package_and_the_torch_of_its_build() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = installs()
    assert len(found) == 7
    for words in found:
        assert words[0] == "install"
        for word in words[1:]:
            name, _, extras = word.rstrip("]").partition("[")
            if extras:
                assert name in (".", project["name"])
                assert set(extras.split(",")) <= project["optional-dependencies"].keys()
            else:
                assert name in ("-q", "-e", "--upgrade", "pip") or name in project["optional-dependencies"]["build"]


def test_the_torch_that_readme_names_is_the_builds() -> None:
    (named,) = set(re.findall(r"torch==[\d.]+", README))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named in project["optional-dependencies"]["build"]
