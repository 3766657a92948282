"""The promise of the project: what is generated does not depend on how it is generated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from answers import PROMPTS, greedy_answer
from pairs import FORCED, NAMES, WIDTHS, Encoding, Pairs

from graphspec.runtime.answer import Generation
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.width_policy import AUTO, Width
from graphspec.verify_width import WidthSchedule

pytestmark = pytest.mark.slow

# Every drafter, both targets, without building everything twice.
INT8_NAMES = (NAMES[0], NAMES[1], NAMES[6], NAMES[7], NAMES[8], NAMES[10])
BUILDS: tuple[tuple[str, Encoding], ...] = (
    *((name, "float32") for name in NAMES),
    *((name, "int8") for name in INT8_NAMES),
    *((name, "int4") for name in NAMES[:2]),
)
NUM_TOKENS = 64
FILTERS = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
)
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS)
every_build = pytest.mark.parametrize(("name", "encoding"), BUILDS)
every_width = pytest.mark.parametrize("width", WIDTHS)


def sampled(index: int, num_tokens: int = 24) -> SamplingParams:
    """One of FILTERS after the other, each with a seed of its own."""
    return replace(FILTERS[index % len(FILTERS)], max_new_tokens=num_tokens, seed=1000 + index)


def ids(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def one_at_a_time(
    bundle: LoadedBundle, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], width: int
) -> list[tuple[int, ...]]:
    return [
        bundle.generate([prompt], each, width=width)[0].token_ids for prompt, each in zip(prompts, params, strict=True)
    ]


@every_width
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_transformers(pairs: Pairs, name: str, width: int) -> None:
    bundle = pairs.loaded(name)
    expected = [greedy_answer(pairs.pair(name).target, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert ids(bundle.generate(PROMPTS, GREEDY, width=width)) == expected
    assert one_at_a_time(bundle, PROMPTS, [GREEDY] * len(PROMPTS), width) == expected


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_accepted_in_these_tests_and_rejected_too(pairs: Pairs, name: str) -> None:
    answers = pairs.loaded(name).generate(PROMPTS, GREEDY)
    accepted = [sum(answer.acceptance.accepted_per_position[position] for answer in answers) for position in range(3)]
    assert accepted[0] >= 20
    assert accepted[1] >= 5
    assert accepted[0] < sum(answer.acceptance.verifications for answer in answers) - 20


@every_build
def test_seeded_tokens_are_the_same_at_every_width_alone_and_in_a_batch(
    pairs: Pairs, name: str, encoding: Encoding
) -> None:
    bundle = pairs.loaded(name, encoding)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(2 * len(FILTERS))]
    params = [sampled(i) for i in range(len(prompts))]
    plain = one_at_a_time(bundle, prompts, params, width=0)
    assert len(set(plain)) == len(plain)
    asked: Sequence[Width] = [*WIDTHS, AUTO, WidthSchedule.parse("1:3,2:0,5:1,8:2")]
    for width in asked:
        assert ids(bundle.generate(prompts, params, width=width)) == plain
    assert one_at_a_time(bundle, prompts, params, WIDTHS[-1]) == plain


@every_build
def test_answers_do_not_depend_on_where_the_prompt_is_cut(pairs: Pairs, name: str, encoding: Encoding) -> None:
    """Nor do the drafts: as many are accepted, at the same places."""
    bundle = pairs.loaded(name, encoding)
    prompt = PROMPTS[5]
    params = [sampled(i) for i in range(len(FILTERS))]
    whole = bundle.generate([prompt] * len(params), params)
    for size in range(1, len(prompt)):
        assert bundle.generate([prompt] * len(params), params, prefill_chunk=size) == whole


@every_build
def test_answers_do_not_depend_on_the_other_rows(pairs: Pairs, name: str, encoding: Encoding) -> None:
    """Nor do the drafts."""
    bundle = pairs.loaded(name, encoding)
    asked = [(PROMPTS[i], sampled(i)) for i in range(len(FILTERS))]
    expected = {answer.seed: answer for answer in _answers(bundle, asked)}
    others = [(PROMPTS[-1 - i], SamplingParams(max_new_tokens=5 + 9 * i, seed=i)) for i in range(3)]
    shuffled = random.Random(0)
    for _ in range(3):
        mixed = [*asked, *others]
        shuffled.shuffle(mixed)
        found = {answer.seed: answer for answer in _answers(bundle, mixed)}
        assert len(found) == len(mixed)
        assert found.items() >= expected.items()


def _answers(bundle: LoadedBundle, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[Generation]:
    return bundle.generate([prompt for prompt, _ in asked], [params for _, params in asked])


@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_drafters_of_one_target_agree_on_seeded_tokens(pairs: Pairs, encoding: Encoding) -> None:
    params = [sampled(i) for i in range(len(PROMPTS))]
    names = [name for name, built in BUILDS if built == encoding and "Llama3" in name]
    answers = [ids(pairs.loaded(name, encoding).generate(PROMPTS, params)) for name in names]
    assert all(answer == answers[0] for answer in answers)
    if encoding == "float32":
        assert ids(pairs.loaded(FORCED).generate(PROMPTS, params)) == answers[0]


def test_another_seed_gives_other_tokens(pairs: Pairs) -> None:
    bundle = pairs.loaded(NAMES[0])
    answers = [
        bundle.generate([PROMPTS[0]], SamplingParams(temperature=1.3, seed=seed, max_new_tokens=24))[0].token_ids
        for seed in (1, 2, 1)
    ]
    assert answers[0] == answers[2] != answers[1]
