"""What a long command shows while it works."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

CODE = """
import time
from graphspec.cli.progress import stages
with stages() as stage:
    stage("opening [checkpoints]")
    stage("tracing")
    time.sleep(2.5)
    print("text")
"""


def test_on_a_terminal_a_line_moves_and_counts_the_seconds() -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", CODE]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment) as shown:
        os.close(slave)
        frames = read_all(master)
        assert shown.stdout is not None
        assert shown.stdout.read() == b"text\n", "what the command itself prints stays whole"
    assert {"0:00:00", "0:00:01", "0:00:02"} <= set(re.findall(r"\d:\d\d:\d\d", frames))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames)
    moving = re.findall(r"(\S) tracing", plain)
    assert len(set(moving)) > 3, "the spinner stands still"


def read_all(descriptor: int) -> str:
    """Everything until the other end is closed, which a pseudo-terminal calls an error."""
    found = b""
    try:
        while block := os.read(descriptor, 4096):
            found += block
    except OSError:
        pass
    os.close(descriptor)
    return found.decode()


def test_elsewhere_each_stage_is_a_line_with_its_time() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "text\n"
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r"\[   \d\.\d s\] opening \[checkpoints\]", first)
    assert re.fullmatch(r"\[   \d\.\d s\] tracing", second)
