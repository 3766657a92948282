"""Tiny pairs of every architecture, built once a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pairs import Pairs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Checkpoints, bundles and torch modules by architecture; each takes seconds when it is first asked for."""
    import torch  # only for the tests that build
    from pairs import Pairs

    torch.set_num_threads(1)  # nothing tiny gains from threads, and they wait for each other where CPUs are shared
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the workers' common one
    made = Pairs(root / "pairs")
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the Python path whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
