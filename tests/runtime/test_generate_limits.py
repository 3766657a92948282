"""Ends of answers: token limits, the end of the cache, stop rules inside a block of accepted drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from answers import greedy_answer
from forced import ForcedBundle
from pairs import FORCED, MAX_LENGTH, NAMES, K, Pairs
from restaging import restage

from graphspec.building import build
from graphspec.errors import RequestError
from graphspec.runtime.answer import Generation
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow

FEW = range(1, 2 * K + 3)
PROMPT = tuple((11 * i + 4) % 128 for i in range(9))


@pytest.fixture(scope="module")
def forced(pairs: Pairs) -> Iterator[ForcedBundle]:
    with ForcedBundle(pairs.bundle(FORCED)) as loaded:
        yield loaded


def long_prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * i * i + 5) % 128 for i in range(length))


@pytest.mark.parametrize("asked", FEW)
@pytest.mark.parametrize("width", range(K + 1))
def test_exactly_the_tokens_asked_for(forced: ForcedBundle, pairs: Pairs, width: int, asked: int) -> None:
    """Every draft is right, also those after the last token: nothing of them is kept."""
    right = greedy_answer(pairs.pair(FORCED).target, PROMPT, 4 * K + 8)
    params = SamplingParams(max_new_tokens=asked)
    (answer,) = forced.generate([PROMPT], params, [right], width=width)
    assert answer.token_ids == right[:asked]
    assert (answer.finish_reason, answer.num_prompt_tokens) == ("length", len(PROMPT))
    assert len(answer.text) == asked


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_tokens_asked_for_of_every_drafter(pairs: Pairs, name: str) -> None:
    expected = greedy_answer(pairs.pair(name).target, PROMPT, FEW[-1])
    params = [SamplingParams(max_new_tokens=asked) for asked in FEW]
    answers = pairs.loaded(name).generate([PROMPT] * len(params), params)
    assert [answer.token_ids for answer in answers] == [expected[:asked] for asked in FEW]


@pytest.mark.parametrize("right", [True, False])
def test_an_answer_fills_what_the_prompt_left(forced: ForcedBundle, pairs: Pairs, right: bool) -> None:
    """Prompts of max_length - 1 and a few less, all at once, beside rows that end earlier and later."""
    prompts = [long_prompt(MAX_LENGTH - room) for room in FEW]
    # What transformers says beyond our limit too, so that the last block could be accepted whole.
    expected = [greedy_answer(pairs.pair(FORCED).target, prompt, len(FEW) + 2 * K) for prompt in prompts]
    drafts = expected if right else []
    answers = forced.generate(prompts, SamplingParams(), drafts)
    for room, answer, tokens in zip(FEW, answers, expected, strict=True):
        assert answer.token_ids == tokens[:room]
        assert answer.finish_reason == "length"
    again = forced.generate([PROMPT, prompts[3]], SamplingParams(max_new_tokens=4), width=0)
    assert again[1].token_ids == expected[3][:4]


def test_a_row_that_ended_at_the_end_of_its_cache_disturbs_no_other(forced: ForcedBundle, pairs: Pairs) -> None:
    """It lies between rows that go on: it is computed along with them, at its old length."""
    target = pairs.pair(FORCED).target
    for room in FEW:
        prompts = [long_prompt(3), long_prompt(MAX_LENGTH - room), long_prompt(5)]
        lengths = (60, room + 2 * K, 60)
        expected = [greedy_answer(target, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        params = [SamplingParams(max_new_tokens=60), SamplingParams(), SamplingParams(max_new_tokens=60)]
        answers = forced.generate(prompts, params, [[], expected[1], []])
        assert [answer.token_ids for answer in answers] == [expected[0], expected[1][:room], expected[2]]


def test_right_drafts_far_beyond_the_end_of_the_cache(tmp_path: Path) -> None:
    """A target as its own draft LM, with a K for which the drafts' positions are the furthest beyond."""
    target, drafted, length = tiny.save_llama(tmp_path / "target", layers=1), 7, 40
    build(
        model=target,
        draft_model_path=target,
        encoding="float32",
        num_speculative_tokens=drafted,
        max_length=length,
        out=tmp_path / "bundle",
    )
    rooms = range(1, 2 * drafted + 3)
    with load(tmp_path / "bundle", num_threads=1) as bundle:
        for room in rooms:
            prompts = [long_prompt(3), long_prompt(length - room), long_prompt(5)]
            expected = [greedy_answer(target, prompt, 20) for prompt in prompts]
            lengths = (20, room, 20)
            answers = bundle.generate(prompts, [SamplingParams(max_new_tokens=n) for n in lengths])
            assert [a.token_ids for a in answers] == [e[:n] for e, n in zip(expected, lengths, strict=True)]
            blocks = [math.ceil((n - 1) / (drafted + 1)) for n in lengths]
            assert [answer.acceptance.verifications for answer in answers] == blocks


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_reaches_the_end_of_the_cache(pairs: Pairs, name: str) -> None:
    prompts = [long_prompt(3), *(long_prompt(MAX_LENGTH - room) for room in FEW[:6]), long_prompt(5)]
    params = [SamplingParams(max_new_tokens=40), *[SamplingParams()] * 6, SamplingParams(max_new_tokens=40)]
    lengths = [40, *FEW[:6], 40]
    target = pairs.pair(name).target
    expected = [greedy_answer(target, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    answers = pairs.loaded(name).generate(prompts, params)
    assert [answer.token_ids for answer in answers] == expected


def test_a_prompt_of_one_token_fills_the_whole_cache(forced: ForcedBundle, pairs: Pairs) -> None:
    expected = greedy_answer(pairs.pair(FORCED).target, (5,), MAX_LENGTH + K)
    (answer,) = forced.generate([[5]], SamplingParams(), [expected])
    assert answer.token_ids == expected[: MAX_LENGTH - 1]


def test_no_tokens_asked_for(forced: ForcedBundle) -> None:
    (answer,) = forced.generate([PROMPT], SamplingParams(max_new_tokens=0))
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((), "", "length")


@pytest.mark.parametrize("empty", ["", [], ()])
def test_an_empty_prompt_is_refused(pairs: Pairs, empty: str | list[int]) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        pairs.loaded(FORCED).generate([PROMPT, empty])


@pytest.mark.parametrize("length", [MAX_LENGTH, MAX_LENGTH + 1, 1000])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(pairs: Pairs, length: int) -> None:
    with pytest.raises(RequestError, match=rf"the prompt has {length} tokens and the bundle holds {MAX_LENGTH} "):
        pairs.loaded(FORCED).generate([PROMPT, long_prompt(length)])


@pytest.mark.parametrize("token", [-1, 128])
def test_a_token_outside_the_vocabulary_is_refused(pairs: Pairs, token: int) -> None:
    with pytest.raises(RequestError, match=rf"holds token {token}; the vocabulary has tokens 0 to 127"):
        pairs.loaded(FORCED).generate([[1, token]])


def test_more_prompts_than_rows_wait_their_turn(pairs: Pairs) -> None:
    bundle = pairs.loaded(FORCED)
    prompts = [long_prompt(1 + i % 7) for i in range(20)]
    params = [SamplingParams(max_new_tokens=3 + i % 5) for i in range(20)]
    expected = [bundle.generate([p], s, width=0)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert [answer.token_ids for answer in bundle.generate(prompts, params)] == expected


@pytest.fixture(scope="module")
def answer_of_distinct_tokens(forced: ForcedBundle) -> tuple[SamplingParams, tuple[int, ...]]:
    """Sampling that gives a different token at each of the first positions, and the tokens."""
    for seed in range(100):
        params = SamplingParams(max_new_tokens=4 * K, temperature=2.0, seed=seed)
        (answer,) = forced.generate([PROMPT], params, width=0)
        if len(set(answer.token_ids)) == len(answer.token_ids):
            return params, answer.token_ids
    raise AssertionError("no seed gives distinct tokens")


@pytest.mark.parametrize("end", FEW)
@pytest.mark.parametrize("width", [0, K])
def test_a_stop_token_ends_the_answer_wherever_it_stands_in_a_block(
    forced: ForcedBundle, answer_of_distinct_tokens: tuple[SamplingParams, tuple[int, ...]], end: int, width: int
) -> None:
    params, tokens = answer_of_distinct_tokens
    stopping = SamplingParams(
        max_new_tokens=4 * K, temperature=2.0, seed=params.seed, stop_token_ids=(tokens[end - 1],)
    )
    (answer,) = forced.generate([PROMPT], stopping, [tokens], width=width)
    assert answer.token_ids == tokens[:end]
    assert answer.finish_reason == "stop"
    assert answer.text == text(forced, params, tokens)[: end - 1]
    assert answer.acceptance.output_tokens == (end - 1 if width else 0)


@pytest.mark.parametrize("end", FEW)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_string_ends_the_answer_wherever_it_stands_in_a_block(
    forced: ForcedBundle, answer_of_distinct_tokens: tuple[SamplingParams, tuple[int, ...]], end: int, size: int
) -> None:
    params, tokens = answer_of_distinct_tokens
    whole = text(forced, params, tokens)
    start = max(end - size, 0)
    stopping = SamplingParams(max_new_tokens=4 * K, temperature=2.0, seed=params.seed, stop=(whole[start:end],))
    (answer,) = forced.generate([PROMPT], stopping, [tokens])
    assert answer.token_ids == tokens[:end]
    assert (answer.text, answer.finish_reason) == (whole[:start], "stop")


def text(forced: ForcedBundle, params: SamplingParams, tokens: tuple[int, ...]) -> str:
    (answer,) = forced.generate([PROMPT], params, width=0)
    assert answer.token_ids == tokens
    assert len(answer.text) == len(tokens)
    return answer.text


@pytest.mark.parametrize("end", FEW)
def test_an_eos_inside_a_block_ends_the_answer(
    pairs: Pairs,
    tmp_path: Path,
    answer_of_distinct_tokens: tuple[SamplingParams, tuple[int, ...]],
    end: int,
) -> None:
    params, tokens = answer_of_distinct_tokens
    bundle = restage(pairs.bundle(FORCED), tmp_path / "bundle", eos_token_ids=(tokens[end - 1],))
    with ForcedBundle(bundle) as ending:
        (answer,) = ending.generate([PROMPT], params, [tokens])
        assert answer.token_ids == tokens[:end]
        assert answer.finish_reason == "stop"
        ignoring = SamplingParams(max_new_tokens=4 * K, temperature=2.0, seed=params.seed, ignore_eos=True)
        assert ending.generate([PROMPT], ignoring, [tokens])[0].token_ids == tokens


def test_pieces_of_a_stream_add_up_to_the_answers(pairs: Pairs) -> None:
    bundle = pairs.loaded(NAMES[0])
    prompts = [long_prompt(1 + i) for i in range(10)]
    params = SamplingParams(max_new_tokens=17, seed=1)
    texts, tokens = [""] * 10, [tuple[int, ...]()] * 10
    last = dict[int, Generation]()
    for piece in bundle.stream(prompts, params):
        assert piece.index not in last
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        if piece.generation:
            last[piece.index] = piece.generation
    answers = bundle.generate(prompts, params)
    assert [(a.text, a.token_ids) for a in answers] == list(zip(texts, tokens, strict=True))
    assert last == dict(enumerate(answers))
