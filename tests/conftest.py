"""Tiny pairs of every architecture, built once a session."""

from __future__ import annotations

from collections.abc import Iterator
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
    made = Pairs(tmp_path_factory.mktemp("pairs"))
    yield made
    made.close()
