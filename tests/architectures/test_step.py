"""What one step accepts, commits and leaves for the next, whatever else is in its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny
import torch
from eager import EagerLoop, Row, Turn
from twins import CAPACITY, WINDOWS, K, Twin, load_step

from graphspec.architectures.step import FusedStep

PROMPT = (5, 93, 17, 64, 17, 101, 2)
METHODS = ("eagle", "eagle3", "standalone", "ngram")

Steps = Callable[..., FusedStep]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """A draft checkpoint for each method."""
    root = tmp_path_factory.mktemp("drafts")
    return {
        "eagle": tiny.save_eagle(root / "eagle", tiny.unsaturated(tiny.eagle_tensors())),
        "eagle3": tiny.save_eagle3(root / "eagle3", tiny.unsaturated(tiny.eagle3_tensors())),
        "standalone": tiny.save_llama(root / "standalone", seed=5, layers=2),
        "ngram": None,
    }


@pytest.fixture(scope="module")
def ngram(small: Twin) -> FusedStep:
    """The cheapest step; its drafts are mostly overridden."""
    return load_step(small, None, "ngram")


def answer(twin: Twin, row: Row) -> list[int]:
    """What transformers commits after the row's tokens."""
    return list(twin.whole(row.prompt)[len(row.tokens) :])


def wrong(token: int) -> int:
    return (token + 1) % tiny.VOCABULARY


def loop_of(step: FusedStep, *prompts: Sequence[int], chunk: int = 4, padding: int = -1) -> EagerLoop:
    """Rows whose prompts have run."""
    rows = [Row(prompt=tuple(prompt), chunk=chunk) for prompt in prompts]
    loop = EagerLoop(step, rows, capacity=CAPACITY, padding=padding)
    loop.prefill()
    return loop


@pytest.mark.parametrize(("width", "right"), WINDOWS)
def test_a_window_commits_its_right_drafts_and_the_targets_next_token(
    small: Twin, ngram: FusedStep, width: int, right: int
) -> None:
    loop = loop_of(ngram, PROMPT)
    (row,) = loop.rows
    following, before = answer(small, row), row.kv_len
    offered = [token if i < right else wrong(token) for i, token in enumerate(following[:width])]
    (turn,) = loop.advance(width, [offered])
    assert turn.accepted == right
    assert turn.committed == (*following[: right + 1], *[-1] * (width - right))
    assert turn.next_tokens[0] == following[right]
    assert row.kv_len == before + 1 + right


def test_a_right_draft_after_a_wrong_one_is_not_accepted(small: Twin, ngram: FusedStep) -> None:
    loop = loop_of(ngram, PROMPT)
    first, second, third = answer(small, loop.rows[0])[:3]
    (turn,) = loop.advance(3, [[wrong(first), second, third]])
    assert (turn.accepted, turn.committed) == (0, (first, -1, -1, -1))


@pytest.mark.parametrize("missing", range(K))
def test_a_missing_draft_ends_what_is_accepted(small: Twin, ngram: FusedStep, missing: int) -> None:
    loop = loop_of(ngram, PROMPT)
    following = answer(small, loop.rows[0])
    offered = [-1 if i == missing else token for i, token in enumerate(following[:K])]
    (turn,) = loop.advance(K, [offered])
    assert turn.committed == (*following[: missing + 1], *[-1] * (K - missing))


def test_columns_after_a_rows_tokens_are_no_drafts(small: Twin, ngram: FusedStep) -> None:
    """Even if they hold the right token."""
    first, second = small.whole(PROMPT)[len(PROMPT) + 1 : len(PROMPT) + 3]
    loop = loop_of(ngram, PROMPT, (77,), padding=second)
    turns = loop.advance(K, [[first], answer(small, loop.rows[1])[:K]])
    assert [turn.accepted for turn in turns] == [1, K]
    assert turns[0].committed == (first, second, -1, -1)


def test_a_chunk_inside_a_prompt_leaves_the_prompts_next_token_pending(ngram: FusedStep) -> None:
    loop = EagerLoop(ngram, [Row(prompt=PROMPT, chunk=3)], capacity=CAPACITY)
    (turn,) = loop.advance(0)
    assert (turn.accepted, turn.next_tokens[0], loop.rows[0].kv_len) == (0, PROMPT[3], 3)


def test_the_last_chunk_commits_the_targets_token(small: Twin, ngram: FusedStep) -> None:
    loop = EagerLoop(ngram, [Row(prompt=PROMPT, chunk=3)], capacity=CAPACITY)
    (last,) = loop.prefill()[-1]
    assert last.committed == (small.whole(PROMPT)[len(PROMPT)],)
    assert loop.rows[0].kv_len == len(PROMPT)


@pytest.mark.parametrize("method", METHODS)
def test_a_mixed_step_does_to_each_row_what_it_does_to_the_row_alone(
    llama: Twin, drafts: dict[str, Path | None], method: str
) -> None:
    step = load_step(llama, drafts[method], method)
    prompts = ((77,), PROMPT, tuple(range(20)))  # the second and third still prefill while the first verifies
    together = [Row(prompt=prompt, chunk=4) for prompt in prompts]
    alone = [Row(prompt=prompt, chunk=4) for prompt in prompts]
    loops = [EagerLoop(step, [row], capacity=CAPACITY, padding=7) for row in alone]
    mixed = EagerLoop(step, together, capacity=CAPACITY)
    for number in range(8):
        offered = [_half_right(llama, row, number) for row in together]
        turns = mixed.advance(K, offered)
        for turn, loop, own in zip(turns, loops, offered, strict=True):
            _same(turn, *loop.advance(K, [own]))
    for index, loop in enumerate(loops):
        _same_states(mixed, index, loop)


def _half_right(twin: Twin, row: Row, number: int) -> list[int] | None:
    """Right drafts as far as the number of the step says; every third step, the row's own."""
    if row.prefilling or number % 3 == 2:
        return None
    return [token if i <= number % 3 else wrong(token) for i, token in enumerate(answer(twin, row)[:K])]


def _same(turn: Turn, other: Turn) -> None:
    assert (turn.known, turn.accepted, turn.committed) == (other.known, other.accepted, other.committed)
    assert turn.next_tokens == other.next_tokens
    if turn.draft_logits is not None and other.draft_logits is not None:
        torch.testing.assert_close(turn.draft_logits, other.draft_logits, rtol=1e-3, atol=1e-2)


def _same_states(mixed: EagerLoop, index: int, loop: EagerLoop) -> None:
    """Up to the row's length; what lies beyond is garbage."""
    length = loop.rows[0].kv_len
    for spec, whole, own in zip(mixed.step.states, mixed.states, loop.states, strict=True):
        axis = spec.shape.index("capacity") - 1
        torch.testing.assert_close(
            whole[index].narrow(axis, 0, length), own[0].narrow(axis, 0, length), rtol=1e-3, atol=1e-2
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_row_that_was_computed_and_dropped_goes_on_as_if_it_had_not_been(
    llama: Twin, drafts: dict[str, Path | None], method: str
) -> None:
    step = load_step(llama, drafts[method], method)
    disturbed, calm = (loop_of(step, PROMPT, (77,)) for _ in range(2))
    row = disturbed.rows[0]
    before = (row.kv_len, list(row.tokens), list(row.drafts))
    for width, offered in ((K, answer(llama, row)[:K]), (0, None), (K, [-1] * K)):
        disturbed.advance(width, [offered, None])
        row.kv_len, row.tokens, row.drafts = before[0], list(before[1]), list(before[2])
    for width in (K, 1, K):
        _same(disturbed.advance(width)[0], calm.advance(width)[0])


@pytest.mark.parametrize("method", METHODS)
def test_looking_at_more_positions_than_are_filled_changes_nothing(
    llama: Twin, drafts: dict[str, Path | None], method: str
) -> None:
    step = load_step(llama, drafts[method], method)
    enough = EagerLoop(step, [Row(prompt=PROMPT, chunk=3)], capacity=CAPACITY)
    everything = EagerLoop(step, [Row(prompt=PROMPT, chunk=3)], capacity=CAPACITY, visible=CAPACITY)
    for width in (0, 0, 0, K, K):
        _same(*enough.advance(width), *everything.advance(width))


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_is_used_to_its_last_position(llama: Twin, drafts: dict[str, Path | None], method: str) -> None:
    step = load_step(llama, drafts[method], method)
    room = len(PROMPT) + 2 * (K + 1) + 1  # two windows of right drafts, and the pending token
    loop = EagerLoop(step, [Row(prompt=PROMPT, chunk=len(PROMPT))], capacity=room)
    loop.prefill()
    for _ in range(2):
        (turn,) = loop.advance(K, [answer(llama, loop.rows[0])[:K]])
        assert turn.accepted == K
    assert loop.rows[0].kv_len == room - 1
    assert tuple(loop.rows[0].tokens) == llama.whole(PROMPT)[:room]


@pytest.mark.parametrize("method", METHODS)
def test_a_longer_draft_begins_with_the_shorter_one(llama: Twin, drafts: dict[str, Path | None], method: str) -> None:
    proposed = []
    for count in (1, K, 6):
        loop = loop_of(load_step(llama, drafts[method], method, num_draft_tokens=count), (4, 5, 6, 4, 5))
        loop.advance(1)
        proposed.append(loop.rows[0].drafts)
    assert [len(tokens) for tokens in proposed] == [1, K, 6]
    assert proposed[1][:1] == proposed[0]
    assert proposed[2][:K] == proposed[1]


def test_known_tokens_are_asked_at_offsets_below_0_and_nothing_else_changes(small: Twin, ngram: FusedStep) -> None:
    expected = small.states(PROMPT).logits[: len(PROMPT)]
    for chunk in (1, 3, len(PROMPT)):
        plain, asking = (EagerLoop(ngram, [Row(prompt=PROMPT, chunk=chunk)], capacity=CAPACITY) for _ in range(2))
        logits = []
        while asking.rows[0].prefilling:
            asking.known_asked = min(chunk, len(PROMPT) - asking.rows[0].kv_len) - 1
            (turn,), (other,) = asking.advance(0), plain.advance(0)
            assert turn.committed == other.committed
            assert (turn.known, turn.accepted, turn.next_tokens) == (other.known, other.accepted, other.next_tokens)
            logits.append(turn.logits)
        torch.testing.assert_close(torch.cat(logits).double(), expected, rtol=0, atol=1e-3)


def test_logits_are_those_that_every_committed_token_was_judged_by(small: Twin, ngram: FusedStep) -> None:
    loop = loop_of(ngram, PROMPT)
    for right in (0, 2, K):
        start = len(loop.rows[0].tokens) - 1
        offered = [token if i < right else wrong(token) for i, token in enumerate(answer(small, loop.rows[0])[:K])]
        (turn,) = loop.advance(K, [offered])
        expected = small.states(PROMPT).logits[start : start + right + 1]
        torch.testing.assert_close(turn.logits[: right + 1].double(), expected, rtol=0, atol=1e-3)


def test_the_greedy_variant_does_what_temperature_0_does(small: Twin, ngram: FusedStep) -> None:
    greedy = FusedStep(ngram.target, ngram.drafter, greedy=True)
    loops = [loop_of(step, PROMPT, (77,)) for step in (ngram, greedy)]
    for number in range(4):
        offered = [_half_right(small, row, number) for row in loops[0].rows]
        for turn, other in zip(*(loop.advance(K, offered) for loop in loops), strict=True):
            _same(turn, other)
