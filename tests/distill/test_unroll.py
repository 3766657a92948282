"""The drafter that is trained computes what the drafter that is built computes."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from graphspec.architectures.blocks.decoder import Norm
from graphspec.architectures.drafters.eagle import EagleDrafter
from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.state import StateSpec, layer_caches
from graphspec.architectures.step import FusedStep, StepInputs
from graphspec.building import resolve_pair
from graphspec.distill.methods.eagle.loss import unrolled as unrolled_eagle
from graphspec.distill.methods.eagle3.loss import unrolled as unrolled_eagle3
from graphspec.speculative_config import SpeculativeConfig

K, CAPACITY = 4, 64


@pytest.fixture(scope="module", params=["eagle3", "eagle"])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FusedStep:
    root, method = tmp_path_factory.mktemp("unroll"), request.param
    if method == "eagle3":
        draft = tiny.save_eagle3(root / "draft")
    else:
        draft = tiny.save_eagle(root / "draft", tiny.unsaturated(tiny.eagle_tensors()))
    pair = resolve_pair(tiny.save_llama(root / "target"), draft)
    loaded = pair.architecture.target.load(pair.target, capacity=CAPACITY)
    config = SpeculativeConfig(speculative_method=method, num_speculative_tokens=K)
    return FusedStep(loaded, pair.architecture.drafter.load(loaded, pair.draft, K, config))


def zeros(spec: StateSpec) -> Tensor:
    sizes = {"batch": 1, "capacity": CAPACITY}
    return torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape])


def norm_of(drafter: object) -> Norm:
    assert isinstance(drafter, Eagle3Drafter)
    return drafter.norm


def serve(step: FusedStep, prompt: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Prefills a prompt i64[1, N]: the pending token with K drafts, and each draft's output of the layer."""
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
    # EAGLE-3 norms what its layer puts out, EAGLE-1 may: each once for every draft.
    drafter = step.drafter
    name, owner = ("feature", drafter) if isinstance(drafter, EagleDrafter) else ("forward", norm_of(drafter))
    normed = getattr(owner, name)

    def watched(x: Tensor) -> Tensor:
        seen.append(x)
        out: Tensor = normed(x)
        return out

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(owner, name, watched)
        outputs = step(inputs, [zeros(spec) for spec in step.states])
    return outputs.next_tokens, seen


def trained(step: FusedStep, text: Tensor, *, depth: int, first: int = 0) -> list[Tensor]:
    """The unrolls of a text i64[1, N]."""
    target, drafter = step.target, step.drafter
    window = target.window(torch.zeros(1, dtype=torch.int64), text, torch.arange(CAPACITY))
    with torch.no_grad():
        hidden, _ = target(text, window, layer_caches([zeros(spec) for spec in target.states]), drafter.taps)
        if isinstance(drafter, EagleDrafter):
            return list(unrolled_eagle(drafter, target, text, hidden.final, depth=depth, first=first))
        assert isinstance(drafter, Eagle3Drafter)
        return list(unrolled_eagle3(drafter, target, text, hidden.taps, depth=depth, first=first))


@pytest.mark.parametrize("length", [1, 2, 7, 20])
@pytest.mark.parametrize("first", [0, 1])
def test_a_column_is_the_chain_that_serving_drafts_after_it(step: FusedStep, length: int, first: int) -> None:
    prompt = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(length))
    chain, served = serve(step, prompt)
    # The text goes on as the drafter thinks, so that its own tokens are the ones it is taught with; the rest is
    # there to be seen by mistake.
    text = torch.cat((prompt, chain, torch.full((1, 5), 9)), dim=1)
    first = min(first, length - 1)
    outs = trained(step, text, depth=K, first=first)
    assert len(outs) == len(served) == K
    for taught, inferred in zip(outs, served, strict=True):
        assert (taught[:, length - 1 - first] - inferred[:, 0]).norm() < 1e-4 * inferred.norm()


def test_text_behind_a_column_does_not_change_it(step: FusedStep) -> None:
    text = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(3))
    other = text.clone()
    other[0, 12:] = 5
    before, after = (trained(step, each, depth=3) for each in (text, other))
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        column = 12 - 2 - index  # reads token p+1+j at the most
        torch.testing.assert_close(a[:, : column + 1], b[:, : column + 1], rtol=1e-5, atol=1e-5)
