"""Prompt lookup in the graph copies what a plain search over the token list finds."""

from __future__ import annotations

import pytest
import reference
import torch
from eager import EagerLoop, Row
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from twins import Drafts, K, Twin, check_drafts, load_step

from graphspec.architectures.blocks.decoder import Window
from graphspec.architectures.drafters.ngram import NgramDrafter
from graphspec.architectures.step import Verified
from graphspec.architectures.target import DecoderTarget, Hidden

RANGES = ((1, 1), (1, 3), (2, 3), (3, 3), (2, 8))
REPEATING = (4, 5, 6, 4, 5, 7, 4, 5, 6, 4, 5)


@pytest.mark.parametrize(("n_min", "n_max"), RANGES)
def test_rows_that_accept_differently_are_drafted_for_as_if_alone(small: Twin, n_min: int, n_max: int) -> None:
    step = load_step(small, None, "ngram", ngram_min=n_min, ngram_max=n_max)
    check_drafts(
        step,
        small,
        (REPEATING, (77,), (9, 9, 9, 9, 1, 9)),
        (3, 1, 4),
        lambda known, _: Drafts(tokens=reference.looked_up(known, K, n_min, n_max)),
        own_drafts=2,
    )


@pytest.mark.parametrize("chunk", range(1, len(REPEATING) + 1))
def test_a_prompt_is_drafted_for_alike_however_it_is_chunked(small: Twin, chunk: int) -> None:
    step = load_step(small, None, "ngram")
    check_drafts(
        step, small, (REPEATING,), (chunk,), lambda known, _: Drafts(tokens=reference.looked_up(known, K, 1, 3))
    )


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=24), min_size=1, max_size=3),
    n_min=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 6),
    data=st.data(),
)
def test_any_history_is_searched_longest_and_latest_first(
    small: Twin, rows: list[list[int]], n_min: int, more: int, count: int, data: st.DataObject
) -> None:
    """Whatever the window last run holds after the pending token, and whatever other requests left behind."""
    drafter = NgramDrafter(count, n_min, n_min + more)
    old = [data.draw(st.integers(max(0, len(row) - 6), len(row) - 2)) for row in rows]
    width = max(len(row) - start for row, start in zip(rows, old, strict=True))
    garbage = data.draw(st.integers(-1, 3))
    history = torch.full((len(rows), 40), garbage)
    for index, (row, start) in enumerate(zip(rows, old, strict=True)):
        history[index, :start] = torch.tensor(row[:start])
    tokens = torch.tensor([(row[s:] + [garbage] * width)[:width] for row, s in zip(rows, old, strict=True)])
    kv_len, newest = torch.tensor(old), torch.tensor([len(row) - 1 for row in rows])
    visible = int((kv_len + width).max()) + data.draw(st.integers(0, 3))
    verified = _verified(tokens, kv_len, newest, visible)
    drafts, (kept,) = drafter.propose(small.target, verified, [history])
    assert drafts.tolist() == [reference.looked_up(row, count, n_min, n_min + more) for row in rows]
    assert [kept[index, : len(row)].tolist() for index, row in enumerate(rows)] == rows


def _verified(tokens: Tensor, kv_len: Tensor, newest: Tensor, visible: int) -> Verified:
    nothing = torch.zeros(0)
    return Verified(
        window=Window(kv_len, nothing, nothing, nothing),
        tokens=tokens,
        hidden=Hidden(nothing, nothing, None),
        last=newest - 1 - kv_len,
        kv_len=kv_len,
        next_kv_len=newest,
        key_positions=torch.arange(visible),
    )


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest of two
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2]),  # the longer before the later
        ([7, 8, 7, 8], [7, 8, 7]),  # past the end: on with the period
        ([5, 5], [5, 5, 5]),
        ([1, 2, 3], [-1, -1, -1]),
        ([3], [-1, -1, -1]),
    ],
)
def test_the_search_itself_by_hand(history: list[int], drafts: list[int]) -> None:
    assert reference.looked_up(history, 3, 1, 3) == drafts


def test_rows_without_a_match_step_at_full_width_and_commit_the_targets_token(small: Twin) -> None:
    loop = EagerLoop(load_step(small, None, "ngram", ngram_min=3), [Row(prompt=(1, 2), chunk=2)], capacity=32)
    loop.prefill()
    assert loop.rows[0].drafts == [-1] * K
    (turn,) = loop.advance(K)
    assert turn.accepted == 0
    assert turn.committed == (small.whole((1, 2))[3], -1, -1, -1)
    assert isinstance(loop.step.target, DecoderTarget)
