"""What every checkpoint format looks like to the rest of graphspec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and stored dtype of one tensor, read from the file's header only."""

    shape: tuple[int, ...]
    """As torch sees it: a linear weight is [out, in]."""
    dtype: str
    """The format's own name: "F32", "BF16", "Q4_1", …"""


class Checkpoint(Protocol):
    """A model on disk, in any format, under Hugging Face tensor names and config keys."""

    @property
    def name(self) -> str:
        """What the user called it: a path or a hub id."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file its config, weights and tokenizer are read from, sorted; what a build is keyed by."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Raw config.json (for GGUF: the same keys, made from the metadata)."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name."""
        ...

    def load(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yields `(name, torch.Tensor)` one at a time; floating tensors keep the dtype they are stored in
        (quantised GGUF types come as float32). Raises CheckpointError for unknown names, and one that
        names all non-finite tensors instead of yielding the first."""
        ...

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Those there are of tokenizer.json, tokenizer_config.json, chat_template.jinja,
        generation_config.json and special_tokens_map.json, by file name."""
        ...
