"""The cores that everybody shares, and who else was on them; Linux only."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Places of idle and iowait in a line of /proc/stat."""


def pin(cores: Collection[int]) -> None:
    """This process and those that it starts. Raises SystemExit for a core that is not there."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise SystemExit(f"--cores {','.join(map(str, cores))}: {error.strerror}") from None


def busy_seconds(cores: Collection[int]) -> float:
    """Of the cores since boot, whoever used them; a hypervisor that took one away counts."""
    seconds = 0.0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            ticks = [int(number) for number in numbers[:8]]  # those after are parts of these
            seconds += sum(each for place, each in enumerate(ticks) if place not in _IDLE) / _TICKS
    return seconds
