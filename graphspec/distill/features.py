"""What the target thinks of its own conversations: one pass without gradients, kept on disk as float16.

A conversation's features are one file, so a run that was stopped, or got more conversations, goes on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphspec.architectures.blocks.decoder import LayerCache
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import Checkpoint, fingerprint

from .conversations import Conversation
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
    """Features of conversations under one target, one choice of taps and one precision."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, taps: Sequence[int], precision: str = "float32") -> None:
        facts = f"{fingerprint(checkpoint)} {list(taps)}"
        facts = facts if precision == "float32" else f"{facts} {precision}"
        key = hashlib.sha256(facts.encode()).hexdigest()[:16]
        self._folder, self._taps, self._precision = folder / key, tuple(taps), precision
        self._folder.mkdir(parents=True, exist_ok=True)

    def compute(
        self, target: DecoderTarget, conversations: Sequence[Conversation], on_done: Callable[[int], None]
    ) -> None:
        """Adds those that are missing; `on_done` is told how many more there are."""
        missing = [conversation for conversation in conversations if not self._path(conversation).exists()]
        on_done(len(conversations) - len(missing))
        # Alike lengths side by side: little padding.
        for batch in _batches(sorted(missing, key=lambda conversation: len(conversation.tokens))):
            for conversation, features in zip(
                batch, target_pass(target, batch, self._taps, self._precision), strict=True
            ):
                self._write(self._path(conversation), features)
            on_done(len(batch))

    def load(self, conversation: Conversation) -> Features:
        """In float16, as stored."""
        return Features(**load_file(self._path(conversation)))

    def _path(self, conversation: Conversation) -> Path:
        name = hashlib.sha256(repr(conversation.tokens).encode()).hexdigest()[:24]
        return self._folder / f"{name}.safetensors"

    def _write(self, path: Path, features: Features) -> None:
        """Whole or not at all."""
        partial = path.with_suffix(f".{os.getpid()}")
        save_file({name: tensor.contiguous() for name, tensor in features._asdict().items()}, partial)
        partial.replace(path)


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
    assert hidden.taps is not None
    for row, conversation in enumerate(conversations):
        count = len(conversation.tokens)
        yield Features(tokens[row, :count], hidden.taps[row, :count].half(), hidden.final[row, :count].half())


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
