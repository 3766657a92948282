"""A benchmark runs what `generate` runs, and every prompt in every case."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import NAMES, Pairs

from graphspec.errors import ConfigError, RequestError
from graphspec.runtime.bench.benchmark import Options, benchmark
from graphspec.runtime.bench.measuring import Case, fitting, measure, num_rounds
from graphspec.runtime.bench.prompts import Prompt
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.width_policy import AUTO

PROMPTS = [
    Prompt(str(i), "even" if i % 2 == 0 else "odd", text) for i, text in enumerate(["abcabc", "zyx", "mnop" * 6])
]


@pytest.fixture(scope="module")
def loaded(pairs: Pairs) -> LoadedBundle:
    return pairs.loaded(NAMES[0])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_and_acceptance_are_those_of_generate(loaded: LoadedBundle, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=12)
    asked, left_out = fitting(loaded, PROMPTS, 12, 10)
    cases = [Case(batch, width) for batch in (1, 2) for width in (0, 3, AUTO)]
    seen: list[tuple[int, int]] = []
    measured = measure(loaded, asked, cases, params, lambda done, total: seen.append((done, total)))
    assert left_out == 0
    assert seen == [(done, seen[-1][0]) for done in range(seen[-1][0] + 1)]
    for case in cases:
        for number, each in enumerate(asked):
            seeded = SamplingParams(temperature=temperature, max_new_tokens=12, seed=number)
            (expected,) = loaded.generate([each.ids], seeded, width=case.width)
            answer = measured[case].answers[number]
            assert answer.token_ids == expected.token_ids
            assert answer.acceptance == expected.acceptance or case.width == AUTO  # which goes by what steps cost


def test_steps_rows_and_times_fit_together(loaded: LoadedBundle) -> None:
    asked, _ = fitting(loaded, PROMPTS, 12, 10)
    cases = [Case(1, 0), Case(1, 3), Case(1, AUTO), Case(3, 0), Case(3, 3), Case(3, AUTO)]
    measured = measure(loaded, asked, cases, SamplingParams(max_new_tokens=12))
    for case in cases:
        this = measured[case]
        later = sum(answer.num_later for answer in this.answers.values())
        passes = [answer.acceptance for answer in this.answers.values()]
        alone = later - sum(each.output_tokens for each in passes)
        assert this.times.rows == sum(each.verifications for each in passes) + alone
        assert not alone or case.width != 3
        if case.batch == 1:
            assert this.times.steps == this.times.rows
            rests = sum(answer.rest for answer in this.answers.values())
            assert this.times.steps_device < rests < this.times.steps_wall + this.times.prompts_wall
        else:
            assert this.times.steps < this.times.rows
        assert 0 < this.times.steps_device < this.times.steps_wall
        assert 0 < this.times.prompts_device < this.times.prompts_wall
        assert len(this.steps_alone) == (0 if case.width == AUTO else 15 * num_rounds(len(asked), cases))


def test_steps_alone_are_drawn_as_the_answers_are(loaded: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is predicted from them would else be of greedy steps, which draw nothing."""
    temperatures, admit = set[float](), loaded.engine.admit

    def seen(slot: int, params: SamplingParams, *rest: Any, **named: Any) -> None:
        temperatures.add(params.temperature)
        admit(slot, params, *rest, **named)

    monkeypatch.setattr(loaded.engine, "admit", seen)
    asked, _ = fitting(loaded, PROMPTS, 4, 1)
    measure(loaded, asked, [Case(1, 0), Case(1, 3)], SamplingParams(temperature=0.9, max_new_tokens=4))
    assert temperatures == {0.9}


def test_prompts_without_room_are_left_out_and_counted(loaded: LoadedBundle) -> None:
    room = loaded.manifest.max_length - 8
    texts = ["a" * (2 * room), "abc", "b" * (2 * room), "abc", "c" * (2 * room)]
    prompts = [Prompt(str(number), "x", text) for number, text in enumerate(texts)]
    asked, left_out = fitting(loaded, prompts, 8, 2)
    assert [each.prompt.id for each in asked] == ["1", "3"]
    assert left_out == 2
    assert fitting(loaded, prompts, 8, 9)[1] == 3
    most = len(asked[0].ids)
    assert len(fitting(loaded, prompts, loaded.manifest.max_length - most, 9)[0]) == 2
    assert not fitting(loaded, prompts, loaded.manifest.max_length - most + 1, 9)[0]


def test_by_default_all_widths_and_the_batches_there_are_slots_for_are_run(loaded: LoadedBundle) -> None:
    found = benchmark(loaded, PROMPTS[:1], Options(max_new_tokens=3))
    widths = [*loaded.manifest.widths, AUTO]
    assert [(c.batch, c.width) for c in found.cases] == [(b, w) for b in (1, 2, 4, 8) for w in widths]
    assert found.outputs.equal
    assert found.about["prompts"] == "given, 1 of even"


def test_what_cannot_be_run_is_said(loaded: LoadedBundle) -> None:
    with pytest.raises(RequestError, match="width 9 is not in this bundle"):
        benchmark(loaded, PROMPTS, Options(widths=[9]))
    with pytest.raises(ConfigError, match="batch 9: the bundle is loaded with 8 rows"):
        benchmark(loaded, PROMPTS, Options(batches=[1, 9]))
    with pytest.raises(ConfigError, match="none of 3 prompts fits: with an answer of 127 tokens it may have 1; lower"):
        benchmark(loaded, PROMPTS, Options(max_new_tokens=127))
