"""Values of a wrong type from Python are told in one line, before any file is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphspec
from graphspec.errors import ConfigError

CASES: list[tuple[str, object, str]] = [
    ("model", 5, "the model is 5"),
    ("model", b"target", "the model is b'target'"),
    ("model", ["target"], r"the model is \['target'\]"),
    ("draft_model_path", 5, "the model is 5"),
    ("out", None, "out is None: it must be a path"),
    ("out", 5, "out is 5: it must be a path"),
    ("out", "", "out is ''"),
    ("dump_passes", True, "dump_passes is True"),
    ("arch", 5, "the architecture is 5"),
    ("arch_modules", "my.arch", "the architecture modules are 'my.arch'"),
    ("arch_modules", [5], r"the architecture modules are \[5\]"),
    ("backend", 5, "backend 5 is not known"),
    ("encoding", 8, "encoding 8 is not known"),
    ("encoding", ["int8"], "is not known"),
    ("max_length", "64", "--max-length '64': it must be an integer"),
    ("max_length", 64.0, "--max-length 64.0"),
    ("max_length", True, "--max-length True"),
    ("max_batch_size", None, "--max-batch-size None"),
    ("max_batch_size", "8", "--max-batch-size '8'"),
    ("widths", "0,1", "--widths '0,1': it must be a list of integers"),
    ("widths", 3, "--widths 3"),
    ("widths", [0, "1"], "--widths"),
    ("widths", [0, True], "--widths"),
    ("num_speculative_tokens", [3], "num_speculative_tokens: input should be a valid integer"),
    ("num_speculative_tokens", True, "a whole number is needed"),
    ("speculative_method", 5, "speculative_method: input should be"),
    ("adaptive_speculative_widths", 5, "adaptive_speculative_widths: input should be a valid string"),
]


@pytest.mark.parametrize(("name", "value", "said"), CASES)
def test_a_wrong_type_is_a_config_error(checkpoints: Path, tmp_path: Path, name: str, value: object, said: str) -> None:
    arguments: dict[str, Any] = {"model": checkpoints / "target", "out": tmp_path / "out", name: value}
    if name == "adaptive_speculative_widths":
        arguments["speculative_method"] = "ngram"
    with pytest.raises(ConfigError, match=said) as caught:
        graphspec.build(**arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
