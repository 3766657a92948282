"""What the command-line tests share: a folder of tiny checkpoints, and one bundle built from it by `main`."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command, Run

from graphspec.cli import main

CHAT = "{% for message in messages %}{{ message.content }}:{% endfor %}"
"""A template in the tiny vocabulary."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process."""

    def command(*args: object) -> Run:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Run(status=status, out=captured.out, err=captured.err)

    return command


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` (Llama, chat template) and `eagle`."""
    import tiny

    root = tmp_path_factory.mktemp("cli")
    tiny.save_llama(root / "target", layers=2)
    (root / "target" / "chat_template.jinja").write_text(CHAT)
    tiny.save_eagle(root / "eagle")
    return root


@pytest.fixture(scope="session")
def build_args(checkpoints: Path) -> list[str]:
    """The command line of `bundle`."""
    target, out = checkpoints / "target", checkpoints / "bundles" / "ngram"
    text = f"build --model {target} --num-speculative-tokens 3 --ngram-max 2 --max-length 96 --max-batch-size 2"
    return [*text.split(), "--widths", "0,3", "-o", str(out)]


@pytest.fixture(scope="session")
def bundle(build_args: list[str]) -> Path:
    """Built once; tests only read it."""
    assert main(build_args) == 0
    return Path(build_args[-1])
