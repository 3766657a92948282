"""Tiny targets and their transformers twins, made once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny
import torch
from twins import Twin, load_twin


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small only lose by threads: many times over where others use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A Llama of 8 layers."""
    return load_twin(tiny.save_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A Qwen3 of 8 layers."""
    return load_twin(tiny.save_qwen3(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A Llama of 2 layers, where only the number of steps matters."""
    return load_twin(tiny.save_llama(tmp_path_factory.mktemp("small"), layers=2))
