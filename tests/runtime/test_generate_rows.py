"""Rows of an engine are given back, however a generation ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from pairs import NAMES, Pairs

from graphspec.errors import EngineError
from graphspec.runtime.answer import Piece
from graphspec.runtime.engine import Chunk, Pending
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow

ROWS = 8
PROMPTS = [[1 + i, 2, 3] for i in range(ROWS)]


@pytest.fixture
def bundle(pairs: Pairs) -> LoadedBundle:
    return pairs.loaded(NAMES[3])


def rows_stepped_together(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of as many prompts as there are rows run in the first step."""
    seen = list[int]()
    step = bundle._engine.step

    def counted(slots: Sequence[int], width: int, *, num_drafts: int, logits: bool) -> Pending:
        seen.append(len(slots))
        return step(slots, width, num_drafts=num_drafts, logits=logits)

    with monkeypatch.context() as patch:
        patch.setattr(bundle._engine, "step", counted)
        assert len(bundle.generate(PROMPTS, SamplingParams(max_new_tokens=6))) == ROWS
    return seen[0]


def pieces(bundle: LoadedBundle, prompts: Sequence[Sequence[int]] = PROMPTS, new: int = 6) -> Iterator[Piece]:
    return bundle.stream(prompts, SamplingParams(max_new_tokens=new))


@pytest.mark.parametrize("taken", [0, 1, 3, ROWS, ROWS + 3])
def test_a_stream_dropped_after_any_piece_keeps_no_row(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    stream = pieces(bundle)
    for _ in range(taken):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert rows_stepped_together(bundle, monkeypatch) == ROWS


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_an_error_in_a_prefill_keeps_no_row(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    prefill, calls = bundle._engine.prefill, list[Chunk]()

    def failing(chunk: Chunk) -> Pending:
        if len(calls) == fails_at:
            raise RuntimeError("the device said no")
        calls.append(chunk)
        return prefill(chunk)

    with monkeypatch.context() as patch:
        patch.setattr(bundle._engine, "prefill", failing)
        with pytest.raises(EngineError, match="the engine failed: the device said no"):
            list(pieces(bundle))
    assert rows_stepped_together(bundle, monkeypatch) == ROWS


def test_an_error_in_a_step_keeps_no_row(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(slots: Sequence[int], width: int, **_: bool) -> Pending:
        raise RuntimeError(f"no step of {len(slots)} rows at {width}")

    with monkeypatch.context() as patch:
        patch.setattr(bundle._engine, "step", failing)
        with pytest.raises(EngineError, match="the engine failed: no step of 8 rows at 3"):
            list(pieces(bundle))
    assert rows_stepped_together(bundle, monkeypatch) == ROWS


def test_two_streams_in_turn_share_the_rows_and_give_them_back(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has rows while the second begins, and is dropped while the second goes on."""
    first, second = pieces(bundle, PROMPTS[:3]), pieces(bundle, PROMPTS[3:6])
    expected = [answer.token_ids for answer in bundle.generate(PROMPTS[3:6], SamplingParams(max_new_tokens=6))]
    next(first)
    answers = {piece.index: piece.generation for piece in [next(second)]}
    next(first)
    first.close()  # type: ignore[attr-defined]
    answers |= {piece.index: piece.generation for piece in second}
    assert [answer.token_ids for _, answer in sorted(answers.items()) if answer] == expected
    assert rows_stepped_together(bundle, monkeypatch) == ROWS


def test_a_stream_left_in_the_middle_keeps_nobody_waiting(bundle: LoadedBundle) -> None:
    """Its rows go on with the others', and its pieces are there when it is taken up again."""
    expected = [answer.token_ids for answer in bundle.generate(PROMPTS, SamplingParams(max_new_tokens=6))]
    first = pieces(bundle)
    found = {piece.index: piece.generation for piece in [next(first)]}
    again = bundle.generate(PROMPTS, SamplingParams(max_new_tokens=6))
    found |= {piece.index: piece.generation for piece in first}
    assert [answer.token_ids for answer in again] == expected
    assert [answer.token_ids for _, answer in sorted(found.items()) if answer] == expected


def test_threads_share_the_rows(bundle: LoadedBundle) -> None:
    params = [SamplingParams(max_new_tokens=20 + i, temperature=0.9, seed=i) for i in range(12)]
    alone = [bundle.generate([PROMPTS[i % ROWS]] * 3, one) for i, one in enumerate(params)]
    with ThreadPoolExecutor(len(params)) as threads:
        found = threads.map(lambda i: bundle.generate([PROMPTS[i % ROWS]] * 3, params[i]), range(len(params)))
        assert list(found) == alone


def test_an_interrupt_in_a_step_ends_what_ran_and_nothing_later(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tokens were read before Ctrl-C came cannot be known: another stream must not go on with a hole in it."""
    other = pieces(bundle, PROMPTS[:2], new=20)
    next(other)

    def interrupted(slots: Sequence[int], width: int, **_: bool) -> Pending:
        raise KeyboardInterrupt(f"of {len(slots)} rows at {width}")

    with monkeypatch.context() as patch:
        patch.setattr(bundle._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pieces(bundle, PROMPTS[2:4]))
    with pytest.raises(EngineError, match="interrupted by KeyboardInterrupt"):
        list(other)
    assert rows_stepped_together(bundle, monkeypatch) == ROWS
