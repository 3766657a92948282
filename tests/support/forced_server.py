"""A scheduler on a real tiny bundle whose drafts the test gives: what a step accepts is known before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from callers import Caller, reached
from forced import force

from graphspec.bundle import open_bundle
from graphspec.runtime.answer import Generation
from graphspec.runtime.engine import Pending
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine, host
from graphspec.runtime.rows import BatchReport
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.scheduler import GenerationRequest, Scheduler
from graphspec.runtime.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one request was told, and what it cost."""

    generation: Generation
    streamed: tuple[str, ...]
    """Texts of the pieces."""
    steps: int
    """Launched in all."""
    late_rows: int
    """Rows of launches whose results counted for nobody."""


@dataclass
class ForcedServer:
    """One engine, and for each call a scheduler of its own: nothing is left in the cache from the call before."""

    root: Path
    num_slots: int = 6
    _rows: list[int] = field(default_factory=list)
    """Of every launch that commits."""

    def __post_init__(self) -> None:
        self._bundle = open_bundle(self.root, host=host())
        self._engine = OnnxRuntimeEngine(self._bundle, num_slots=self.num_slots, num_threads=1)
        self._tokenizer = Tokenizer.load(self.root)
        self._step = self._engine.step
        self._engine.step = self._counted  # type: ignore[method-assign]

    def close(self) -> None:
        self._engine.close()

    def answer(self, prompt: Sequence[int], params: SamplingParams, drafts: Sequence[int] = (), **options: Any) -> Told:
        """One request by itself. Options are those of `answers`."""
        ((generation, caller),), steps, late = self._run([prompt], [params], [drafts], **options)
        streamed = tuple(piece.text for piece in caller.pieces)
        return Told(generation=generation, streamed=streamed, steps=steps, late_rows=late)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        drafts: Sequence[Sequence[int]] = (),
        **options: Any,
    ) -> list[Generation]:
        """Requests at once; `drafts` as in forced.py. Options: width, overlap, eos (token ids in place of the
        bundle's)."""
        return [generation for generation, _ in self._run(prompts, params, drafts, **options)[0]]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        drafts: Sequence[Sequence[int]],
        *,
        width: int,
        overlap: bool,
        eos: tuple[int, ...] = (),
    ) -> tuple[list[tuple[Generation, Caller]], int, int]:
        for slot, (prompt, tokens) in enumerate(zip_longest(prompts, drafts[: self.num_slots], fillvalue=())):
            if slot < self.num_slots:
                force(self._engine, slot, len(prompt), tokens)
        self._rows.clear()
        batches: list[BatchReport] = []
        manifest = self._bundle.manifest.model_copy(update={"eos_token_ids": eos} if eos else {})
        loaded = LoadedBundle(replace(self._bundle, manifest=manifest), self._engine, self._tokenizer)
        scheduler = Scheduler(loaded, width=width, overlap=overlap, prefill_chunk=4, on_batch=batches.append)
        callers = [Caller() for _ in prompts]
        for prompt, each, caller in zip(prompts, params, callers, strict=True):
            scheduler.submit(GenerationRequest(prompt=tuple(prompt), params=each), caller)
        generations = [caller.generation() for caller in callers]
        assert reached(lambda: scheduler._loop.idle)  # the late step too
        assert scheduler._loop._free == set(range(self.num_slots))
        scheduler.close()
        begun = sum(bool(each.max_new_tokens is None or each.max_new_tokens) for each in params)
        late = sum(self._rows) + begun - sum(len(batch.accepted) for batch in batches)
        return list(zip(generations, callers, strict=True)), len(self._rows), late

    def _counted(self, slots: Sequence[int], width: int, **options: Any) -> Pending:
        self._rows.append(len(slots))
        return self._step(slots, width, **options)
