"""An engine driven by hand: prompts in small chunks, and sampling that differs by row."""

from __future__ import annotations

from collections.abc import Sequence

from graphspec.runtime.engine import NO_TOKEN, Chunk, Engine, Pending
from graphspec.runtime.sampling import SamplingParams, uniform_table

CHUNK = 4
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01, seed=2),
)


def admit(engine: Engine, slot: int, prompt: Sequence[int], params: SamplingParams) -> Pending:
    """Queues the request's prompt → the last chunk's Pending."""
    engine.admit(slot, params, uniform_table(params.seed or 0, engine.capacity))
    for start in range(0, len(prompt), CHUNK):
        end = start + CHUNK
        following = prompt[end] if end < len(prompt) else NO_TOKEN
        pending = engine.prefill(Chunk(slot=slot, tokens=tuple(prompt[start:end]), next_token=following))
    return pending
