"""Engines on a real GPU, where one is found; not run on one yet.

Here is what the other engines are held to in other ways: numerics against the eager step in bfloat16, and equal output
at every width. What every engine does (launching ahead, rows on their own, slots that forget) is in
test_engine_protocol.py, which runs on the GPU too: `pytest -m gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from answers import PROMPTS
from gpu import why_no_gpu
from pairs import NAMES, WIDTHS, Pairs

from graphspec.architectures.state import layer_caches
from graphspec.architectures.step import FusedStep
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.runtime.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu()),
]

TOKENS = 32
SLACK = 2.0
"""How much less exact than the eager step in bfloat16 an engine may be."""


@pytest.fixture(scope="module", params=[NAMES[1], NAMES[7]])
def named(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[tuple[str, LoadedBundle]]:
    with load(pairs.gpu_engines(request.param)) as loaded:
        yield request.param, loaded


def test_greedy_tokens_are_the_likeliest_within_the_error_of_bfloat16(
    pairs: Pairs, named: tuple[str, LoadedBundle]
) -> None:
    """An engine as exact as the eager step in bfloat16 chooses nothing more than twice its error below the best."""
    name, loaded = named
    exact, rounded = pairs.step(name), pairs.fresh_step(name).cast("bfloat16")
    for prompt in PROMPTS[2:6]:
        (answer,) = loaded.generate([prompt], SamplingParams(max_new_tokens=TOKENS, ignore_eos=True), width=0)
        whole = [*prompt, *answer.token_ids]
        logits = eager_logits(exact, whole)
        error = (eager_logits(rounded, whole) - logits).abs().max()
        after = logits[len(prompt) - 1 : -1]
        chosen = after[torch.arange(TOKENS), torch.tensor(answer.token_ids)]
        assert (after.amax(1) - chosen).max() <= SLACK * 2 * error


def eager_logits(step: FusedStep, tokens: list[int]) -> torch.Tensor:
    """f32[T, V]: the target's, in one pass."""
    target = step.target
    dtype = next(target.parameters()).dtype
    sizes = {"batch": 1, "capacity": target.capacity}
    states = [
        torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in s.shape], dtype=dtype)
        for s in target.states
    ]
    ids = torch.tensor([tokens])
    window = target.window(torch.zeros(1, dtype=torch.int64), ids, torch.arange(len(tokens) + 1))
    with torch.no_grad():
        hidden, _ = target(ids, window, layer_caches(states))
        return target.logits(hidden.final)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_the_same_at_every_width_and_in_a_batch(named: tuple[str, LoadedBundle], temperature: float) -> None:
    _, loaded = named
    prompts = PROMPTS[2:6]
    params = [SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    plain = [loaded.generate([p], [s], width=0)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    for width in WIDTHS:
        together = [answer.token_ids for answer in loaded.generate(prompts, params, width=width)]
        assert together == plain, f"width {width}"
