"""Commands of the documentation that do not end by themselves."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(command: str, folder: Path) -> Iterator[str]:
    """Runs a server on a free port → the port."""
    assert " --port 8000" in command
    words = shlex.split(command.replace(" --port 8000", " --port 0"))
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            while "Server ready" not in (line := process.stdout.readline()):
                assert line, "the server has ended"
            yield line.split("http://")[1].split()[0].rpartition(":")[2]
        finally:
            process.terminate()
            assert process.wait(60) == 0
