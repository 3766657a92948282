"""The drafter that is trained computes what the drafter that is built computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.state import StateSpec
from graphspec.architectures.step import FusedStep, StepInputs
from graphspec.building import resolve_pair
from graphspec.distill.methods.eagle3.loss import unrolled
from graphspec.speculative_config import SpeculativeConfig

K, CAPACITY = 4, 64


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> FusedStep:
    root = tmp_path_factory.mktemp("unroll")
    return load_step(tiny.save_llama(root / "target"), tiny.save_eagle3(root / "draft"))


def drafter_of(step: FusedStep) -> Eagle3Drafter:
    assert isinstance(step.drafter, Eagle3Drafter)
    return step.drafter


def load_step(target: Path, draft: Path) -> FusedStep:
    pair = resolve_pair(target, draft)
    loaded = pair.architecture.target.load(pair.target, capacity=CAPACITY)
    config = SpeculativeConfig(speculative_method="eagle3", num_speculative_tokens=K)
    return FusedStep(loaded, pair.architecture.drafter.load(loaded, pair.draft, K, config))


def zeros(spec: StateSpec) -> Tensor:
    sizes = {"batch": 1, "capacity": CAPACITY}
    return torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape])


def serve(step: FusedStep, prompt: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Prefills a prompt i64[1, N]: the pending token with K drafts, and what each draft's norm was given."""
    length = prompt.shape[1]
    one, row = torch.ones(1, dtype=torch.int64), torch.zeros(1)
    inputs = StepInputs(
        tokens=prompt,
        kv_len=0 * one,
        n_tokens=length * one,
        n_known=length * one,
        next_token=-1 * one,
        verify_offsets=torch.arange(1),
        key_positions=torch.arange(CAPACITY),
        temperature=row,
        top_k=0 * one,
        top_p=row + 1,
        min_p=row,
        uniform=torch.zeros(1, CAPACITY, 1),
    )
    seen: list[Tensor] = []
    hook = drafter_of(step).norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        outputs = step(inputs, [zeros(spec) for spec in step.states])
    hook.remove()
    return outputs.next_tokens, seen


def taps_of(step: FusedStep, tokens: Tensor) -> Tensor:
    target, drafter = step.target, step.drafter
    caches = [zeros(spec) for spec in target.states]
    from graphspec.architectures.state import layer_caches

    window = target.window(torch.zeros(1, dtype=torch.int64), tokens, torch.arange(CAPACITY))
    with torch.no_grad():
        hidden, _ = target(tokens, window, layer_caches(caches), drafter.taps)
    taps: Tensor = hidden.taps
    return taps


@pytest.mark.parametrize("length", [1, 2, 7, 20])
@pytest.mark.parametrize("first", [0, 1])
def test_a_column_is_the_chain_that_serving_drafts_after_it(step: FusedStep, length: int, first: int) -> None:
    prompt = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(length))
    chain, served = serve(step, prompt)
    # The text goes on as the drafter thinks, so that its own tokens are the ones it is taught with; the rest is
    # there to be seen by mistake.
    text = torch.cat((prompt, chain, torch.full((1, 5), 9)), dim=1)
    first = min(first, length - 1)
    with torch.no_grad():
        outs = list(unrolled(drafter_of(step), step.target, text, taps_of(step, text), depth=K, first=first))
    assert len(outs) == len(served) == K
    for trained, inferred in zip(outs, served, strict=True):
        torch.testing.assert_close(trained[:, length - 1 - first], inferred[:, 0], rtol=1e-4, atol=1e-4)


def test_text_behind_a_column_does_not_change_it(step: FusedStep) -> None:
    text = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(3))
    other = text.clone()
    other[0, 12:] = 5
    with torch.no_grad():
        before, after = (
            list(unrolled(drafter_of(step), step.target, t, taps_of(step, t), depth=3)) for t in (text, other)
        )
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        column = 12 - 2 - index  # reads token p+1+j at the most
        torch.testing.assert_close(a[:, : column + 1], b[:, : column + 1], rtol=1e-5, atol=1e-5)
