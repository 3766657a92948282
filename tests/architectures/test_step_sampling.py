"""A seeded row commits the same tokens at any width, chunking and batch, and those follow the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from drawing import Filters, Floats, answers, distribution
from eager import EagerLoop, Row, Sampling
from reference import target_states
from scipy import stats
from torch import Tensor, nn
from twins import CAPACITY, K, Twin, load_step

from graphspec.architectures.blocks.decoder import Window
from graphspec.architectures.state import StateSpec
from graphspec.architectures.step import FusedStep, StepInputs, Verified
from graphspec.architectures.target import Hidden

PROMPT = (5, 93, 17, 64, 17, 101, 2)
COUNT = 16
EACH = (
    Filters(temperature=0.7),
    Filters(temperature=1.3),
    Filters(top_k=5),
    Filters(top_p=0.9),
    Filters(min_p=0.05),
    Filters(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
)


def row_of(prompt: Sequence[int], filters: Filters, *, seed: int, chunk: int) -> Row:
    """A row that draws by a table of its own."""
    # Six times hotter, because the tiny model is so sure of itself.
    sampling = Sampling(
        temperature=6 * filters.temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=filters.min_p,
        uniform=torch.rand(CAPACITY, generator=torch.Generator().manual_seed(seed)),
    )
    return Row(prompt=tuple(prompt), chunk=chunk, sampling=sampling)


def generate(step: FusedStep, rows: Sequence[Row], width: int, hints: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """COUNT tokens of each row; with hints, known answers, drafts are right, half right and wrong in turn."""
    loop = EagerLoop(step, rows, capacity=CAPACITY)
    loop.prefill()
    turn = 0
    while any(len(row.tokens) < len(row.prompt) + COUNT for row in rows):
        offered = [_hinted(row, hint, turn + i) for i, (row, hint) in enumerate(zip(rows, hints, strict=False))]
        loop.advance(width, offered or None)
        turn += 1
    return [row.tokens[len(row.prompt) : len(row.prompt) + COUNT] for row in rows]


def _hinted(row: Row, hint: Sequence[int], turn: int) -> list[int]:
    after = list(hint[len(row.tokens) - len(row.prompt) :])[:K]
    right = (K, 1, 0)[turn % 3]
    return [token if i < right else (token + 1) % 128 for i, token in enumerate(after)] + [-1] * (K - len(after))


@pytest.mark.parametrize("filters", EACH, ids=str)
def test_a_seeded_row_commits_the_same_at_any_width_and_chunking(small: Twin, filters: Filters) -> None:
    step = load_step(small, None, "ngram")
    (plain,) = generate(step, [row_of(PROMPT, filters, seed=1, chunk=len(PROMPT))], 0)
    for width, chunk in ((1, 1), (2, 3), (K, 5)):
        assert generate(step, [row_of(PROMPT, filters, seed=1, chunk=chunk)], width, [plain]) == [plain]


def test_rows_of_a_batch_draw_as_if_alone_in_any_order(small: Twin) -> None:
    step = load_step(small, None, "ngram")
    prompts = (PROMPT, (77,), (9, 8, 7, 6, 5))
    kinds = (EACH[-1], Filters(temperature=0.0), EACH[1])

    def row(index: int) -> Row:
        return row_of(prompts[index], kinds[index], seed=index, chunk=2 + index)

    alone = [generate(step, [row(index)], 0)[0] for index in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        rows, hints = [row(i) for i in order], [alone[i] for i in order]
        assert generate(step, rows, K, hints) == hints


@pytest.mark.parametrize("filters", EACH, ids=str)
def test_each_token_is_what_the_target_says_at_its_position(small: Twin, filters: Filters) -> None:
    row = row_of(PROMPT, filters, seed=2, chunk=4)
    (tokens,) = generate(load_step(small, None, "ngram"), [row], K)
    whole = [*PROMPT, *tokens]
    logits = target_states(small.model, whole).logits.numpy() / 6
    assert row.sampling.uniform is not None
    for position in range(len(PROMPT), len(whole)):
        uniform = float(row.sampling.uniform[position])
        assert whole[position] in answers(logits[position - 1], filters, uniform)


class ChainTarget(nn.Module):
    """A target whose next token depends on the last one alone, by a table of logits f32[V, V]."""

    states: tuple[StateSpec, ...] = ()

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def window(self, start: Tensor, *_: Tensor) -> Window:
        nothing = torch.zeros(0)
        return Window(start, nothing, nothing, nothing)

    def forward(self, tokens: Tensor, _window: Window, caches: list[Any], **_: Any) -> Any:
        final = tokens.clamp(min=0).unsqueeze(-1)
        return Hidden(final, final, None), caches

    def own_logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden.squeeze(-1)]


class NoDrafter:
    """The test makes the drafts."""

    num_draft_tokens = 2
    taps: tuple[int, ...] = ()
    states: tuple[StateSpec, ...] = ()

    def propose(self, _target: Any, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return torch.full((verified.kv_len.shape[0], 2), -1), states


DRAWS, TOKENS = 20_000, 12
MIX = Filters(temperature=1.3, top_k=9, top_p=0.95, min_p=0.02)


def chain_step(
    step: FusedStep, pending: Tensor, drafts: Tensor, kv_len: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """→ accepted i64[B], committed i64[B, 3] of one step at width 2."""
    count = torch.ones(len(pending), dtype=torch.int64)
    outputs = step(
        StepInputs(
            tokens=torch.cat((pending[:, None], drafts), dim=1),
            kv_len=kv_len,
            n_tokens=3 * count,
            n_known=count,
            next_token=-count,
            verify_offsets=torch.arange(3),
            key_positions=torch.arange(uniform.shape[1]),
            temperature=MIX.temperature * count.float(),
            top_k=MIX.top_k * count,
            top_p=MIX.top_p * count.float(),
            min_p=MIX.min_p * count.float(),
            uniform=uniform,
        ),
        [],
    )
    return outputs.accepted, outputs.committed


def draw_three(step: FusedStep, seed: int, *, right: float) -> tuple[Tensor, list[float]]:
    """Three tokens after token 0 in each of DRAWS rows, i64[DRAWS, 3], with drafts of which a share is right; and
    the mean number accepted by step."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(DRAWS, 9, 1, generator=generator)
    oracle = _three_tokens(step, uniform)
    tokens, known = torch.zeros(DRAWS, 9, dtype=torch.int64), torch.ones(DRAWS, dtype=torch.int64)
    rows, accepted_by_step = torch.arange(DRAWS), []
    while int(known.min()) < 4:
        wanted = oracle[rows[:, None], (known[:, None] - 1 + torch.arange(2)).clamp(max=4)]
        is_right = torch.rand(DRAWS, 2, generator=generator) < right
        drafts = torch.where(is_right, wanted, (wanted + 1) % TOKENS)
        accepted, committed = chain_step(step, tokens[rows, known - 1], drafts, known - 1, uniform)
        for column in range(3):
            tokens[rows, known + column] = committed[:, column].clamp(min=0)
        known = (known + accepted + 1).clamp(max=5)
        accepted_by_step.append(float(accepted.float().mean()))
    return tokens[:, 1:4], accepted_by_step


def _three_tokens(step: FusedStep, uniform: Tensor) -> Tensor:
    """What plain decoding commits, i64[DRAWS, 5], without any draft."""
    none, pending, tokens = torch.full((DRAWS, 2), -1), torch.zeros(DRAWS, dtype=torch.int64), []
    for position in range(5):
        _, committed = chain_step(step, pending, none, torch.full((DRAWS,), position), uniform)
        pending = committed[:, 0]
        tokens.append(pending)
    return torch.stack(tokens, dim=1)


@pytest.mark.parametrize(("right", "first_step"), [(1.0, 2.0), (0.0, 0.0), (0.5, 0.75)])
def test_committed_tokens_follow_the_targets_distribution_whatever_is_drafted(right: float, first_step: float) -> None:
    """20,000 rows of three tokens each, against the exact probabilities of every sequence."""
    table = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
    step = FusedStep(ChainTarget(table), NoDrafter())  # type: ignore[arg-type]
    tokens, accepted = draw_three(step, seed=11, right=right)
    assert accepted[0] == pytest.approx(first_step, abs=0.02)
    moves = np.stack([distribution(row.double().numpy(), MIX) for row in table])
    exact = np.einsum("a,ab,bc->abc", moves[0], moves, moves)
    found = np.zeros_like(exact)
    np.add.at(found, tuple(tokens.numpy().T), 1)
    assert found[exact == 0].sum() == 0
    for axes in ((1, 2), (0, 2), (0, 1), (2,), (0,)):  # each token, and each two in a row
        assert fit(found.sum(axis=axes), exact.sum(axis=axes) * DRAWS) > 0.001


def fit(found: Floats, expected: Floats) -> float:
    """The chi-square p-value; what is expected fewer than five times counts as one."""
    often = expected >= 5
    seen, wanted = [*found[often]], [*expected[often]]
    if (rest := float(expected[~often].sum())) > 0:
        seen, wanted = [*seen, found[~often].sum()], [*wanted, rest]
    return float(stats.chisquare(seen, wanted).pvalue)
