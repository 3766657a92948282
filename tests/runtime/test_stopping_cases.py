"""Where answers end inside a block of accepted drafts: the cases of reference/serving.md §4, by their numbers.

Each goes through the scheduler, at every width, with overlap and without it, and with the end at every place of the
first blocks. The drafts are forced: what a step accepts is known before it runs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from answers import greedy_answer
from forced import METHOD, passes_by_hand
from forced_server import ForcedServer, Told
from pairs import FORCED, Pairs

from graphspec.building import build
from graphspec.errors import RequestError
from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow

K = 4
MAX_LENGTH = 64
PROMPT = tuple((11 * i + 4) % 128 for i in range(9))
ENDS = range(1, 2 * K + 4)
"""The prompt's own token, and every place of the two blocks after it, whatever the width."""
WHOLE = 6 * K
MODES = list(product((True, False), range(K + 1)))
every_mode = pytest.mark.parametrize(("overlap", "width"), MODES)
every_end = pytest.mark.parametrize("end", ENDS)


@pytest.fixture(scope="module")
def server(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForcedServer]:
    out = tmp_path_factory.mktemp("forced") / "bundle"
    build(
        model=pairs.pair(FORCED).target,
        arch=FORCED,
        arch_modules=["forced"],
        speculative_method=METHOD,
        encoding="float32",
        max_length=MAX_LENGTH,
        out=out,
        num_speculative_tokens=K,
    )
    made = ForcedServer(out)
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampling(server: ForcedServer) -> SamplingParams:
    """That gives another token at each place, so that where a token is found says where the answer ended."""
    for seed in range(300):
        params = SamplingParams(temperature=5.0, seed=seed, max_new_tokens=WHOLE)
        tokens = server.answer(PROMPT, params, width=0, overlap=False).generation.token_ids
        if len(set(tokens)) == len(tokens):
            return params
    raise AssertionError("no seed gives distinct tokens")


@pytest.fixture(scope="module")
def whole(server: ForcedServer, sampling: SamplingParams) -> tuple[int, ...]:
    return server.answer(PROMPT, sampling, width=0, overlap=False).generation.token_ids


@pytest.fixture(scope="module")
def text(server: ForcedServer, sampling: SamplingParams) -> str:
    said = server.answer(PROMPT, sampling, width=0, overlap=False).generation.text
    assert len(said) == WHOLE
    return said


def check(told: Told, tokens: tuple[int, ...], said: str, reason: str) -> None:
    """What is told ends at one place: token ids, text, and the reason."""
    found = told.generation
    assert (found.token_ids, found.text, found.finish_reason) == (tokens, said, reason)
    assert "".join(told.streamed) == said


def check_counts(told: Told, drafts: tuple[int, ...], *, width: int) -> None:
    """Drafts are counted as far as the answer goes, pass for pass."""
    counts = AcceptanceStatistics()
    if width:
        for accepted, kept in passes_by_hand(drafts, told.generation.token_ids, width):
            counts.add(accepted, width, committed=kept)
    assert told.generation.acceptance == counts


def late_after_stop(end: int, *, overlap: bool) -> int:
    """The prompt's token is known when its row has been in two steps, any other when it has been in one more."""
    return 0 if not overlap else 2 if end == 1 else 1


Cut = Callable[[int], tuple[dict[str, Any], tuple[int, ...]]]
"""Fields of a request, and the bundle's EOS, that end the answer with its n-th token."""


@pytest.fixture(params=["eos", "stop token", "stop string"])
def cut(request: pytest.FixtureRequest, whole: tuple[int, ...], text: str) -> Cut:
    cuts: dict[str, Cut] = {
        "eos": lambda end: ({}, (whole[end - 1],)),
        "stop token": lambda end: ({"stop_token_ids": (whole[end - 1],)}, ()),
        "stop string": lambda end: ({"stop": (text[end - 1],)}, ()),
    }
    return cuts[request.param]


@every_mode
def test_a1_the_earliest_of_eos_stop_token_stop_string_and_length_wins(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    cut: Cut,
    width: int,
    overlap: bool,
) -> None:
    for end in ENDS:
        fields, eos = cut(end)
        for limit in (end - 1, end, end + 1):
            params = replace(sampling, max_new_tokens=limit, **fields)
            told = server.answer(PROMPT, params, whole, width=width, overlap=overlap, eos=eos)
            if limit < end:
                check(told, whole[:limit], text[:limit], "length")
            else:
                check(told, whole[:end], text[: end - 1], "stop")
            check_counts(told, whole, width=width)


@every_mode
def test_a1_of_two_stops_the_first_in_token_order_wins(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    cut: Cut,
    width: int,
    overlap: bool,
) -> None:
    """Whatever kinds they are, and though both may come in one block."""
    for first, second in ((end, end + gap) for end in ENDS for gap in (1, 2, K)):
        fields, eos = cut(first)
        later = {
            "stop_token_ids": (*fields.get("stop_token_ids", ()), whole[second - 1]),
            "stop": fields.get("stop", ()),
        }
        params = replace(sampling, **later)
        told = server.answer(PROMPT, params, whole, width=width, overlap=overlap, eos=eos)
        check(told, whole[:first], text[: first - 1], "stop")


@every_mode
@every_end
def test_a2_a8_a_stop_string_is_found_inside_a_block_and_across_blocks(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    end: int,
    width: int,
    overlap: bool,
) -> None:
    """Of one character to more than two blocks have, and with or without it in the text."""
    for size, included in ((1, False), (2, False), (2, True), (K + 1, False), (K + 2, False), (end, True)):
        start = max(end - size, 0)
        params = replace(sampling, stop=("\0", text[start:end]), include_stop_str_in_output=included)
        told = server.answer(PROMPT, params, whole, width=width, overlap=overlap)
        check(told, whole[:end], text[: end if included else start], "stop")
        check_counts(told, whole, width=width)


@every_mode
def test_a4_a5_nothing_after_an_eos_that_was_accepted_is_output(
    server: ForcedServer, pairs: Pairs, width: int, overlap: bool
) -> None:
    """Greedy, as transformers says it, with one of its tokens declared to be EOS."""
    tokens = greedy_answer(pairs.pair(FORCED).target, PROMPT, WHOLE)
    for eos in set(tokens):
        end = tokens.index(eos) + 1
        told = server.answer(
            PROMPT, SamplingParams(max_new_tokens=WHOLE), tokens, width=width, overlap=overlap, eos=(eos,)
        )
        assert (told.generation.token_ids, told.generation.finish_reason) == (tokens[:end], "stop")
        assert len(told.generation.text) == sum(map(len, told.streamed)) == end - 1


@every_mode
@every_end
def test_a7_an_eos_that_is_only_drafted_ends_nothing(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    end: int,
    width: int,
    overlap: bool,
) -> None:
    eos = next(token for token in range(128) if token not in whole)
    drafts = (*whole[: end - 1], eos, *whole[end:])
    told = server.answer(PROMPT, sampling, drafts, width=width, overlap=overlap, eos=(eos,))
    check(told, whole, text, "length")
    check_counts(told, drafts, width=width)


@every_mode
@pytest.mark.parametrize("block", range(3))
def test_a10_a_stop_at_every_offset_of_a_block_also_its_last_is_seen_with_that_block(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    cut: Cut,
    block: int,
    width: int,
    overlap: bool,
) -> None:
    """Not a step later: all that is lost is the row that was launched before it was known."""
    for offset in range(width + 1):
        end = 1 + block * (width + 1) + offset + 1
        if end <= WHOLE - 2 * (K + 1):  # else the limit might be certain before the stop is seen
            fields, eos = cut(end)
            told = server.answer(PROMPT, replace(sampling, **fields), whole, width=width, overlap=overlap, eos=eos)
            check(told, whole[:end], text[: end - 1], "stop")
            assert told.late_rows == late_after_stop(end, overlap=overlap)
            assert told.steps == block + 1 + told.late_rows


@every_mode
def test_a10_a_stop_with_the_prompt_s_own_token(
    server: ForcedServer, sampling: SamplingParams, whole: tuple[int, ...], cut: Cut, width: int, overlap: bool
) -> None:
    fields, eos = cut(1)
    told = server.answer(PROMPT, replace(sampling, **fields), whole, width=width, overlap=overlap, eos=eos)
    check(told, whole[:1], "", "stop")
    assert told.steps == told.late_rows == late_after_stop(1, overlap=overlap)


@every_mode
@pytest.mark.parametrize("limit", range(2 * K + 3))
def test_a11_a13_a14_exactly_the_tokens_asked_for_are_told_and_counted_with_no_step_too_many(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    limit: int,
    width: int,
    overlap: bool,
) -> None:
    told = server.answer(PROMPT, replace(sampling, max_new_tokens=limit), whole, width=width, overlap=overlap)
    check(told, whole[:limit], text[:limit], "length")
    check_counts(told, whole, width=width)
    needed = -(-max(limit - 1, 0) // (width + 1))
    assert needed <= told.steps <= needed + (overlap and width > 0)
    assert told.late_rows == told.steps - needed


@every_mode
def test_a13_one_place_left_in_the_cache_and_every_draft_right(
    server: ForcedServer, pairs: Pairs, width: int, overlap: bool
) -> None:
    for room in range(1, 2 * K + 3):
        prompt = tuple((7 * i * i + 5) % 128 for i in range(MAX_LENGTH - room))
        tokens = greedy_answer(pairs.pair(FORCED).target, prompt, room + 2 * K)
        told = server.answer(prompt, SamplingParams(), tokens, width=width, overlap=overlap)
        assert (told.generation.token_ids, told.generation.finish_reason) == (tokens[:room], "length")


@every_mode
def test_a16_min_tokens_counts_tokens_and_leaves_drafting_on(
    server: ForcedServer,
    sampling: SamplingParams,
    whole: tuple[int, ...],
    text: str,
    cut: Cut,
    width: int,
    overlap: bool,
) -> None:
    """A stop that comes as the first token after the minimum ends the answer; one that comes within it does not."""
    for end in ENDS:
        fields, eos = cut(end)
        for minimum in (end - 1, end, WHOLE):
            params = replace(sampling, min_tokens=minimum, **fields)
            told = server.answer(PROMPT, params, whole, width=width, overlap=overlap, eos=eos)
            if minimum < end:
                check(told, whole[:end], text[: end - 1], "stop")
            else:
                check(told, whole, text, "length")
            check_counts(told, whole, width=width)


def test_a17_a_minimum_gives_no_warnings(
    server: ForcedServer, sampling: SamplingParams, whole: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Python's own are errors in these tests."""
    with caplog.at_level(logging.DEBUG):
        params = replace(sampling, min_tokens=WHOLE, stop_token_ids=(whole[3],))
        told = server.answer(PROMPT, params, whole, width=K, overlap=True)
    assert told.generation.token_ids == whole
    assert not caplog.records


@every_mode
def test_b16_a_seed_gives_the_same_tokens_beside_any_others(
    server: ForcedServer, sampling: SamplingParams, whole: tuple[int, ...], width: int, overlap: bool
) -> None:
    draw = random.Random(width)
    others = [replace(sampling, seed=1000 + i, temperature=1.0, max_new_tokens=3 + 4 * i) for i in range(8)]
    for _ in range(3):
        asked = [sampling, *draw.sample(others, draw.randrange(1, 8))]
        draw.shuffle(asked)
        prompts = [PROMPT if one is sampling else PROMPT[: 1 + (one.seed or 0) % 7] for one in asked]
        drafts = [whole if one is sampling else () for one in asked]
        answers = server.answers(prompts, asked, drafts[: server.num_slots], width=width, overlap=overlap)
        assert answers[asked.index(sampling)].token_ids == whole
        assert len({answer.token_ids for answer in answers}) == len(answers)


def test_b17_requests_without_a_seed_are_not_all_alike(server: ForcedServer) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=12)
    one_by_one = [server.answer(PROMPT, params, width=K, overlap=True).generation for _ in range(10)]
    at_once = server.answers([PROMPT] * 6, [params] * 6, width=K, overlap=True)
    assert len({answer.token_ids for answer in (*one_by_one, *at_once)}) > 10
    assert len({answer.seed for answer in (*one_by_one, *at_once)}) == 16


@every_mode
def test_b19_a_drafter_that_is_always_wrong_gives_plain_text(
    server: ForcedServer, sampling: SamplingParams, whole: tuple[int, ...], text: str, width: int, overlap: bool
) -> None:
    wrong = tuple((token + 1) % 128 for token in whole)
    told = server.answer(PROMPT, sampling, wrong, width=width, overlap=overlap)
    check(told, whole, text, "length")
    assert told.generation.acceptance.accepted == 0
    assert told.steps == WHOLE - 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows", range(1, 6))
def test_b26_rows_of_a_batch_keep_their_own_drafts(
    server: ForcedServer, sampling: SamplingParams, rows: int, overlap: bool
) -> None:
    """Each row's drafts are right up to another place; in any order, each has its own accepted."""
    draw = random.Random(rows)
    asked = [replace(sampling, seed=i, temperature=1.0, max_new_tokens=13 + i) for i in range(rows)]
    prompts = [tuple((13 * i + 5 * k) % 128 for k in range(3 + i)) for i in range(rows)]
    for width in range(1, K + 1):
        plain = server.answers(prompts, asked, width=0, overlap=overlap)
        order = draw.sample(range(rows), rows)
        drafts = [(*plain[i].token_ids[: 2 + 3 * i], *[-1] * 20) for i in order]
        answers = server.answers(
            [prompts[i] for i in order], [asked[i] for i in order], drafts, width=width, overlap=overlap
        )
        for i, given, answer in zip(order, drafts, answers, strict=True):
            assert answer.token_ids == plain[i].token_ids
            passes = passes_by_hand(given, answer.token_ids, width)
            assert answer.acceptance.accepted == sum(accepted for accepted, _ in passes)
            assert answer.acceptance.verifications == len(passes)


@pytest.mark.parametrize("overlap", [True, False])
def test_e2_room_is_that_of_the_bundle_s_length_without_what_drafts_need_beyond_it(
    server: ForcedServer, overlap: bool
) -> None:
    full = tuple(range(MAX_LENGTH))
    told = server.answer(full[:-1], SamplingParams(), width=K, overlap=overlap)
    assert (len(told.generation.token_ids), told.generation.finish_reason) == (1, "length")
    with pytest.raises(RequestError, match=f"{MAX_LENGTH} tokens and the bundle holds {MAX_LENGTH}"):
        server.answer(full, SamplingParams(), width=K, overlap=overlap)


@every_mode
def test_e14_steps_without_drafts_are_steps_of_one_token(
    server: ForcedServer, sampling: SamplingParams, whole: tuple[int, ...], text: str, width: int, overlap: bool
) -> None:
    """None at all, or none after a place."""
    for count in (0, 1, 5, 9):
        drafts = whole[:count]
        told = server.answer(PROMPT, sampling, drafts, width=width, overlap=overlap)
        check(told, whole, text, "length")
        check_counts(told, drafts, width=width)
