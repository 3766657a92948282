"""What a draft is worth, by the real engine: held-out prompts answered greedily with and without it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Greedy answers to some prompts, one at a time."""

    prompts: int
    width: int
    acceptance: AcceptanceStatistics
    tokens_per_second: float
    """Prefill included."""
    plain_tokens_per_second: float
    """At width 0."""


def measure(bundle: Path, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, num_threads: int) -> Measurement:
    """Answers each prompt at the bundle's widest width and at width 0, alternating."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    acceptances: list[AcceptanceStatistics] = []
    tokens, seconds = {0: 0, 1: 0}, {0: 0.0, 1: 0.0}
    with load(bundle, max_batch_size=1, num_threads=num_threads) as loaded:
        width = loaded.manifest.widths[-1]
        for prompt in prompts:
            for speculative in (0, 1):
                count, took, acceptance = _timed(loaded, prompt, params, width * speculative)
                tokens[speculative] += count
                seconds[speculative] += took
                acceptances += [acceptance] if speculative else []
    return Measurement(
        prompts=len(prompts),
        width=width,
        acceptance=reduce(AcceptanceStatistics.merge, acceptances, AcceptanceStatistics()),
        tokens_per_second=tokens[1] / seconds[1] if seconds[1] else 0.0,
        plain_tokens_per_second=tokens[0] / seconds[0] if seconds[0] else 0.0,
    )


def _timed(
    loaded: LoadedBundle, prompt: Sequence[int], params: SamplingParams, width: int
) -> tuple[int, float, AcceptanceStatistics]:
    started = time.monotonic()
    (generation,) = loaded.generate([prompt], params, width=width)
    return len(generation.token_ids), time.monotonic() - started, generation.acceptance
