"""A drafter of a model team's own: it proposes what a table says for each position of a row.

Declared and found like any other architecture: `registered(["forced"])`, or `--arch-module forced`. A test fills
the table, and so knows what is accepted before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphspec.architecture import STEP_CAPABILITIES, Architecture, DrafterKind
from graphspec.architectures.llama3.arch import TARGET
from graphspec.bundle import open_bundle
from graphspec.runtime.answer import Generation
from graphspec.runtime.caches import PackedCaches, zeros
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine, host
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.text import Tokenizer

METHOD = "dspark"
"""What it answers to: no other drafter does."""
TABLE = "draft.forced"
"""The state that holds it, i64[B, LONGEST]; -1: no draft."""
LONGEST = 512
"""Positions it has drafts for: a row's table is whole from the start, as a cache is not."""


def _load(_target: Any, _draft: None, num_draft_tokens: int, _config: Any) -> Any:
    from forced_drafter import ForcedDrafter

    return ForcedDrafter(num_draft_tokens)


FORCED = DrafterKind(
    name="forced",
    label="Forced",
    methods=(METHOD,),
    draft_checkpoint=False,
    matches=lambda _target, _draft: False,
    default_num_speculative_tokens=3,
    load=_load,
)
ARCHITECTURES = (Architecture(target=TARGET, drafter=FORCED, capabilities=STEP_CAPABILITIES),)


class ForcedBundle:
    """A loaded bundle of the architecture; prompt i of a call runs in slot i, with the drafts given for it."""

    def __init__(self, root: Path, *, num_slots: int = 8) -> None:
        bundle = open_bundle(root, host=host())
        self._engine = OnnxRuntimeEngine(bundle, num_slots=num_slots, num_threads=1)
        self._loaded = LoadedBundle(bundle, self._engine, Tokenizer.load(root))
        self.manifest = bundle.manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loaded.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        drafts: Sequence[Sequence[int]] = (),
        **options: Any,
    ) -> list[Generation]:
        """`drafts`: for each prompt, what to draft for the answer's first position and on; then nothing."""
        assert len(prompts) <= self._engine.num_slots
        for slot, (prompt, tokens) in enumerate(zip_longest(prompts, drafts, fillvalue=())):
            force(self._engine, slot, len(prompt), tokens)
        return self._loaded.generate(prompts, params, **options)


def force(engine: OnnxRuntimeEngine, slot: int, start: int, tokens: Sequence[int]) -> None:
    """Gives a free slot a table that drafts these tokens from position `start` on, and nothing else. Only a test can:
    it is laid where the engine finds what a row held before."""
    caches = engine._caches
    assert isinstance(caches, PackedCaches)
    caches._resident.pop(slot, None)
    caches._alone_slot = None if caches._alone_slot == slot else caches._alone_slot
    caches._aside[slot] = [zeros(state, 1, 0) for state in caches._states]
    (table,) = (held for held, state in zip(caches._aside[slot], caches._states, strict=True) if state.input == TABLE)
    table[:] = -1
    table[0, start : start + len(tokens)] = tokens[: LONGEST - start]


def passes_by_hand(drafts: Sequence[int], answer: Sequence[int], width: int) -> list[tuple[int, int]]:
    """(accepted, kept) of every verification of one request: `answer` is all it generates."""
    passes, newest = list[tuple[int, int]](), 0  # the prompt's own step commits answer[0]
    while (left := len(answer) - newest - 1) > 0:
        block = range(newest + 1, newest + 1 + min(width, left))
        wrong = [at for at in block if at >= len(drafts) or drafts[at] != answer[at]]
        accepted = (wrong[0] if wrong else block.stop) - newest - 1
        kept = min(accepted + 1, left)
        passes.append((accepted, kept))
        newest += kept
    return passes
