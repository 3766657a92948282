"""Drafts that are right at a given rate: how often, and that nothing but the speed depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt

import numpy as np
import pytest
from fake_device import FakeDevice, FakeLibrary
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pairs import NAMES, K, Pairs

from graphspec.bundle import Host, open_bundle
from graphspec.errors import ConfigError
from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.bench.benchmark import Options, benchmark
from graphspec.runtime.bench.measuring import Case, fitting, measure, true_answers
from graphspec.runtime.bench.prompts import Prompt
from graphspec.runtime.bench.synthetic import (
    SyntheticRecorder,
    TakesDrafts,
    base_probability,
    synthetic_acceptance,
    synthetic_drafts,
    synthetic_recorder,
)
from graphspec.runtime.engine import NO_TOKEN, Chunk
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams, uniform_table
from graphspec.runtime.tensorrt_engine import TensorRtEngine
from graphspec.runtime.width_policy import AUTO
from graphspec.verify_width import WidthSchedule

HOST = Host(backend="tensorrt-rtx", version="1.0.0", device_classes=frozenset({"rtx"}))
VOCABULARY = 128
PROMPTS = [Prompt(str(i), "x", text) for i, text in enumerate(["abcabc", "zyx", "mnop" * 6, "q", "hgfe"])]
MOST = 96
DRAFTERS = [name for name in NAMES if "Llama3" in name]

answers = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("width", "rate", "base"), [(2, 0.5, 0.618), (3, 0.6, 0.7655), (5, 0.8, 0.9265), (7, 0.6, 0.872)]
)
def test_the_base_is_the_one_that_max_finds(width: int, rate: float, base: float) -> None:
    """As its own sampler gave them (reference, max.md §3.7)."""
    assert base_probability(rate, width) == pytest.approx(base, abs=5e-4)


@given(rate=st.floats(0, 1), width=st.integers(1, 128))
def test_the_mean_of_the_bases_powers_is_the_rate(rate: float, width: int) -> None:
    base = base_probability(rate, width)
    assert 0 <= base <= 1
    # Each power grows by no more than its exponent times what b does.
    assert np.mean(base ** np.arange(1, width + 1)) == pytest.approx(rate, abs=1e-9 * width)


def test_a_schedule_is_calibrated_where_it_is_widest() -> None:
    schedules = [WidthSchedule.parse(text) for text in ("1:2,4:0", "1:0")]
    found = synthetic_acceptance(0.6, [0, 2, 4, AUTO, *schedules], 4)
    assert found.bases["1:2,4:0"] == found.bases["2"] != found.bases["4"] == found.bases[AUTO]
    assert found.bases.keys() == {"2", "4", AUTO, "1:2,4:0"}, "what never verifies has none"


@given(rate=st.floats(-2, 3), more=st.floats(0, 1), width=st.integers(1, 16))
def test_the_base_grows_with_the_rate_and_ends_at_0_and_1(rate: float, more: float, width: int) -> None:
    base = base_probability(rate, width)
    assert base <= base_probability(rate + more, width) + 1e-9
    assert (base == 0) == (rate <= 0) or rate < 1e-8
    assert (base == 1) == (rate >= 1) or rate > 1 - 1e-8


@given(answer=answers, seed=seeds, base=st.floats(0, 1), num_drafts=st.integers(1, 5))
def test_a_draft_is_the_answers_token_or_another_of_the_vocabulary(
    answer: list[int], seed: int, base: float, num_drafts: int
) -> None:
    drafts = synthetic_drafts(answer, base, seed=seed, num_drafts=num_drafts, vocabulary=VOCABULARY)
    assert drafts.shape == (len(answer) + 1, num_drafts)
    for count, row in enumerate(drafts):
        for place, token in enumerate(row, start=count):
            assert (token == NO_TOKEN) == (place >= len(answer))
            assert -1 <= token < VOCABULARY
            assert not (base == 1 and place < len(answer) and token != answer[place])
            assert not (base == 0 and place < len(answer) and token == answer[place])


@given(answer=answers, more=answers, seed=seeds, base=st.floats(0, 1))
def test_what_is_drafted_at_a_position_depends_on_seed_and_position_alone(
    answer: list[int], more: list[int], seed: int, base: float
) -> None:
    draft = partial(synthetic_drafts, base=base, seed=seed, num_drafts=3, vocabulary=VOCABULARY)
    whole = draft([*answer, *more])
    known = max(len(answer) - 2, 0)  # rows whose drafts lie in the shorter answer
    assert (draft(answer)[:known] == whole[:known]).all()


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_so_many_are_accepted_in_the_mean_of_many_steps(width: int, rate: float) -> None:
    """Within 4.5 standard errors, of 40,000 tokens. Steps begin where the ones before ended."""
    answer = np.random.default_rng(0).integers(0, VOCABULARY, 40_000).tolist()
    base = base_probability(rate, width)
    drafts = synthetic_drafts(answer, base, seed=3, num_drafts=5, vocabulary=VOCABULARY)
    accepted = np.array(steps(answer, drafts, width)[:-width])  # the last ones may have fewer drafts
    chances = base ** np.arange(width + 1) * np.append(np.full(width, 1 - base), 1)  # of 0 … width accepted
    mean = chances @ np.arange(width + 1)
    assert mean == pytest.approx(rate * width, abs=1e-6)
    deviation = sqrt(chances @ (np.arange(width + 1) - mean) ** 2)
    assert abs(accepted.mean() - mean) < 4.5 * deviation / sqrt(len(accepted))
    for place in range(width):  # each is as likely right as the first, whatever came before
        reached = accepted >= place
        spread = sqrt(base * (1 - base) / reached.sum())
        assert abs((accepted[reached] > place).mean() - base) < 4.5 * spread


def test_whether_a_draft_is_right_has_nothing_to_do_with_how_its_token_was_drawn() -> None:
    """Where it had, sampled answers of low draws would be foreseen more often."""
    answer = np.random.default_rng(0).integers(0, VOCABULARY, 20_000).tolist()
    right = synthetic_drafts(answer, 0.5, seed=3, num_drafts=1, vocabulary=VOCABULARY)[:-1, 0] == answer
    draws = uniform_table(3, len(answer))[:, 0]
    assert abs(np.corrcoef(right, draws)[0, 1]) < 4.5 / sqrt(len(answer))


def steps(answer: Sequence[int], drafts: NDArray[np.int64], width: int) -> list[int]:
    """Drafts accepted in each step of the answer, after its first token."""
    found, count = list[int](), 1
    while count < len(answer):
        row, truth = drafts[count][:width], answer[count : count + width]
        hits = [draft == token for draft, token in zip(row, truth, strict=False)]
        found.append(hits.index(False) if False in hits else len(hits))
        count += found[-1] + 1
    return found


@pytest.fixture(scope="module", params=DRAFTERS)
def loaded(request: pytest.FixtureRequest, pairs: Pairs) -> LoadedBundle:
    return pairs.loaded(request.param)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_is_right_is_accepted_and_nothing_else(loaded: LoadedBundle, temperature: float) -> None:
    """Whatever drafts: in every step of every answer, by the graph's own accept rule, in any batch."""
    asked, _ = fitting(loaded, PROMPTS, MOST, len(PROMPTS))
    params = SamplingParams(temperature=temperature, max_new_tokens=MOST)
    truth = true_answers(loaded, asked, 2, params)
    assert {number: len(answer) for number, answer in truth.items()} == dict.fromkeys(range(len(asked)), MOST)
    for rate, width in ((0.5, 1), (0.5, 3), (1.0, 2), (0.0, 3)):
        acceptance = synthetic_acceptance(rate, [0, width], K)
        draft = partial(synthetic_drafts, base=acceptance.bases[str(width)], num_drafts=K, vocabulary=VOCABULARY)
        cases = [Case(1, width), Case(3, width)]
        measured = measure(loaded, asked, cases, params, new_recorder=partial(synthetic_recorder, acceptance, truth))
        for answer, number in ((measured[case].answers[number], number) for case in cases for number in truth):
            assert answer.token_ids == truth[number]
            counts = steps(truth[number], draft(truth[number], seed=number), width)
            assert answer.acceptance == statistics(counts, width)
            if rate == 1:
                assert counts[:-1] == [width] * (len(counts) - 1)
            if rate == 0:
                assert counts == [0] * (MOST - 1)


def statistics(counts: Sequence[int], width: int) -> AcceptanceStatistics:
    """Of an answer's steps after its first token; the last one may commit more than it takes."""
    found = AcceptanceStatistics()
    for count in counts:
        found.add(count, width, committed=min(count + 1, MOST - 1 - found.output_tokens))
    return found


def test_the_width_that_is_chosen_goes_by_synthetic_acceptance(pairs: Pairs) -> None:
    """On an engine whose own drafts are never known to the policy."""
    for rate in (0.0, 1.0):
        options = Options(max_new_tokens=MOST, batches=[2], widths=[AUTO, K], synthetic_acceptance_rate=rate)
        found = benchmark(pairs.loaded(NAMES[0]), PROMPTS, options)
        assert found.outputs.equal
        fixed, auto = found.cases[1:]
        assert (fixed.width, auto.width) == (K, AUTO)
        assert fixed.tokens_per_step == pytest.approx(1 + rate * K, rel=0.05)
        assert auto.tokens_per_step == 1 if rate == 0 else auto.tokens_per_step > 0.7 * fixed.tokens_per_step
        assert found.synthetic is not None
        assert found.synthetic.bases == {str(K): rate, AUTO: rate}


def test_the_policy_and_the_engine_have_the_same_drafts(pairs: Pairs) -> None:
    bundle = pairs.loaded(NAMES[0])
    engine = bundle.engine
    assert isinstance(engine, TakesDrafts)
    drafts = np.arange(4 * K).reshape(4, K)
    recorder = SyntheticRecorder(engine, 2, lambda seed: drafts + seed)
    recorder.admit(1, SamplingParams(seed=5), uniform_table(0, engine.capacity))
    middle = recorder.prefill(Chunk(slot=1, tokens=(1, 2, 3), next_token=4)).result()
    assert middle.drafts.tolist() != (drafts[1:2] + 5).tolist()
    counts = [0]
    results = [recorder.prefill(Chunk(slot=1, tokens=(4,))).result()]
    results += [recorder.step([1], 1).result() for _ in range(4)]
    for result in results:
        counts.append(counts[-1] + len(result.tokens(0)))
    assert counts[-1] > len(drafts)
    assert [result.drafts_of(0) for result in results] == [(drafts[min(n, 3)] + 5).tolist() for n in counts[1:]]
    assert engine.drafts(1)[1:].tolist() == results[-1].drafts_of(0)


@pytest.mark.parametrize("name", [NAMES[0], "UnifiedNgramLlama3ForCausalLM"])
def test_no_more_is_right_than_was_asked_for(pairs: Pairs, name: str) -> None:
    """Of a drafter that drafts on demand; lookup proposes all in any case."""
    engine = pairs.loaded(name).engine
    assert isinstance(engine, TakesDrafts)
    truth = true_answers(pairs.loaded(name), fitting(pairs.loaded(name), PROMPTS, MOST, 1)[0], 1, SamplingParams())[0]
    drafts = synthetic_drafts(truth, 1.0, seed=0, num_drafts=K, vocabulary=VOCABULARY)
    recorder = SyntheticRecorder(engine, 1, lambda _: drafts)
    recorder.admit(0, SamplingParams(seed=0), uniform_table(0, engine.capacity))
    (prompt,) = (asked.ids for asked in fitting(pairs.loaded(name), PROMPTS, MOST, 1)[0])
    recorder.prefill(Chunk(slot=0, tokens=prompt, num_drafts=1)).result()
    counts = [recorder.step([0], K, num_drafts=asked).result().accepted[0] for asked in (2, 0, K, 1)]
    assert counts == ([1, 2, 0, K] if engine.drafts_on_demand else [K] * 4)


def test_width_0_has_no_acceptance(pairs: Pairs) -> None:
    options = Options(max_new_tokens=3, widths=[0], synthetic_acceptance_rate=0.5)
    with pytest.raises(ConfigError, match=r"rate 0\.5: width 0 accepts nothing; name another"):
        benchmark(pairs.loaded(NAMES[0]), PROMPTS, options)


@pytest.mark.slow
def test_an_engine_that_keeps_its_drafts_to_itself_is_refused(pairs: Pairs) -> None:
    opened = open_bundle(pairs.engines(NAMES[0]), host=HOST)
    engine = TensorRtEngine(opened, FakeLibrary(), FakeDevice(), num_slots=1)
    on_gpu = LoadedBundle(opened, engine, pairs.loaded(NAMES[0]).tokenizer)
    said = r"rate 0\.5: rows of tensorrt-rtx keep their drafts on the GPU, where a benchmark cannot replace them; leave"
    with pytest.raises(ConfigError, match=said):
        benchmark(on_gpu, PROMPTS, Options(max_new_tokens=3, synthetic_acceptance_rate=0.5))
