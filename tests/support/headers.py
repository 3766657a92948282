"""Checkpoints of which only the header exists: resolution reads no more."""

from __future__ import annotations

from typing import Any

import pytest

from graphspec.checkpoints import TensorInfo
from graphspec.errors import ResolutionError
from graphspec.registry import registered
from graphspec.resolution import resolve


class Header:
    """A config and the shapes of tensors."""

    files = ()

    def __init__(self, name: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.name, self.config = name, config
        self.tensors = {tensor: TensorInfo(shape=shape, dtype="F32") for tensor, shape in shapes.items()}

    def load(self, names: Any) -> Any:
        raise AssertionError(f"resolution reads no weights, and it asked for {list(names)}")

    def tokenizer_files(self) -> dict[str, bytes]:
        return {}


def target_header(name: str = "LlamaForCausalLM", model_type: str = "llama") -> Header:
    """Of 8 layers of hidden size 64, with 128 tokens."""
    sizes = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 8}
    return Header("target", {"architectures": [name], "model_type": model_type, **sizes}, {"model.norm.weight": (64,)})


def refusal(draft: Header, method: str) -> str:
    """What a draft is told that does not belong to the target."""
    with pytest.raises(ResolutionError) as error:
        resolve(target_header(), draft, method, None, registered())
    assert "\n" not in str(error.value)
    return str(error.value)
