"""What the target thinks of its own conversations: one pass without gradients, kept on disk as float16 where it fits.

A conversation's features are one file, so a run that was stopped, or got more conversations, goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphspec.architectures.blocks.decoder import LayerCache
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import Checkpoint, fingerprint

from .conversations import Conversation
from .files import whole_file
from .padding import side_by_side
from .precision import products_in

_TOKENS_IN_A_PASS = 2048


class Features(NamedTuple):
    """Of one conversation of N tokens, or of a batch padded to N."""

    tokens: Tensor
    """i64[…, N]."""
    taps: Tensor
    """[…, N, m · H]: raw hidden states entering the tapped layers."""
    final: Tensor
    """[…, N, H]: what the target's head reads."""


class FeatureStore:
    """Features of conversations under one target, one choice of taps and one precision.

    Without taps, what a store with `others` left in the same folder is read as well: `final` is in it.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        taps: Sequence[int],
        precision: str = "float32",
        *,
        others: Sequence[int] = (),
    ) -> None:
        def place(read: Sequence[int]) -> Path:
            facts = f"{fingerprint(checkpoint)} {list(read)}"
            facts = facts if precision == "float32" else f"{facts} {precision}"
            return folder / hashlib.sha256(facts.encode()).hexdigest()[:16]

        self._folder, self._taps, self._precision = place(taps), tuple(taps), precision
        self._places = (self._folder,) if taps else (self._folder, place(others))

    def compute(
        self, target: DecoderTarget, conversations: Sequence[Conversation], on_done: Callable[[int], None]
    ) -> None:
        """Adds those that are missing; `on_done` is told how many more there are."""
        missing = [conversation for conversation in conversations if self._found(conversation) is None]
        on_done(len(conversations) - len(missing))
        # Alike lengths side by side: little padding.
        for batch in _batches(sorted(missing, key=lambda conversation: len(conversation.tokens))):
            for conversation, features in zip(
                batch, target_pass(target, batch, self._taps, self._precision), strict=True
            ):
                self._write(self._folder / _file_name(conversation), features)
            on_done(len(batch))

    def load(self, conversation: Conversation) -> Features:
        """As stored: in float16, or in float32 what is too large for it."""
        path = self._found(conversation)
        assert path is not None, "features are computed before they are loaded"
        with safe_open(path, "pt") as file:
            tokens, final = file.get_tensor("tokens"), file.get_tensor("final")
            return Features(tokens, file.get_tensor("taps") if self._taps else final[:, :0], final)

    def _found(self, conversation: Conversation) -> Path | None:
        name = _file_name(conversation)
        return next((path for place in self._places if (path := place / name).exists()), None)

    def _write(self, path: Path, features: Features) -> None:
        with whole_file(path) as partial:
            save_file({name: tensor.contiguous() for name, tensor in features._asdict().items()}, partial)


def _file_name(conversation: Conversation) -> str:
    return f"{hashlib.sha256(repr(conversation.tokens).encode()).hexdigest()[:24]}.safetensors"


def target_pass(
    target: DecoderTarget,
    conversations: Sequence[Conversation],
    taps: tuple[int, ...],
    precision: str = "float32",
) -> Iterator[Features]:
    """Features of each, from one batch."""
    tokens = side_by_side([torch.tensor(conversation.tokens) for conversation in conversations])
    length = tokens.shape[1]
    with torch.no_grad(), products_in(precision):
        window = target.window(torch.zeros(len(tokens), dtype=torch.int64), tokens, torch.arange(length))
        hidden, _ = target(tokens, window, _empty_caches(target, tokens, precision), taps)
    read = hidden.final[..., :0] if hidden.taps is None else hidden.taps
    for row, conversation in enumerate(conversations):
        count = len(conversation.tokens)
        yield Features(tokens[row, :count], _small(read[row, :count]), _small(hidden.final[row, :count]))


def _small(states: Tensor) -> Tensor:
    """In float16, unless one of some targets' few enormous values would be infinite there."""
    half = states.half()
    return half if half.isfinite().all() else states.float()


def _empty_caches(target: DecoderTarget, tokens: Tensor, precision: str) -> list[LayerCache]:
    shape = (len(tokens), target.config.kv_heads, tokens.shape[1], target.config.head_dim)
    dtype = getattr(torch, precision)
    return [
        LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        for _ in range(target.config.layers)
    ]


def _batches(conversations: Sequence[Conversation]) -> Iterator[Sequence[Conversation]]:
    start = 0
    while start < len(conversations):
        end = start + 1
        while end < len(conversations) and (end + 1 - start) * len(conversations[end].tokens) <= _TOKENS_IN_A_PASS:
            end += 1
        yield conversations[start:end]
        start = end
