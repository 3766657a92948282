"""Rows of an engine are given back, however a generation ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from pairs import NAMES, Pairs

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

    def counted(slots: Sequence[int], width: int) -> Pending:
        seen.append(len(slots))
        return step(slots, width)

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
        with pytest.raises(RuntimeError, match="the device said no"):
            list(pieces(bundle))
    assert rows_stepped_together(bundle, monkeypatch) == ROWS


def test_an_error_in_a_step_keeps_no_row(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(slots: Sequence[int], width: int) -> Pending:
        raise RuntimeError(f"no step of {len(slots)} rows at {width}")

    with monkeypatch.context() as patch:
        patch.setattr(bundle._engine, "step", failing)
        with pytest.raises(RuntimeError, match="no step of 8 rows at 3"):
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
