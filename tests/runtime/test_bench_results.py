"""Figures of a benchmark from known measurements."""

from __future__ import annotations

import json

import pytest

from graphspec.errors import EngineError
from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.bench.measuring import Answered, Asked, Case, Measured
from graphspec.runtime.bench.prompts import Prompt
from graphspec.runtime.bench.recorder import Times
from graphspec.runtime.bench.results import Report, report

TOKENS = {0: tuple(range(13)), 1: tuple(range(20, 27)), 2: (5,)}
"""Of three answers: 12, 6 and no tokens after the first."""
ASKED = [Asked(Prompt(f"q{i}", name, "text"), (1,)) for i, name in enumerate(("chat", "code", "chat"))]


def accepted(*counts: int) -> AcceptanceStatistics:
    """One pass of width 2 for each count."""
    statistics = AcceptanceStatistics()
    for count in counts:
        statistics.add(count, 2)
    return statistics


def measured(times: Times, rests: tuple[float, float], steps: list[float], *passes: list[int]) -> Measured:
    first = (0.5, 0.1, 0.3)
    statistics = [accepted(*counts) for counts in passes] or [AcceptanceStatistics()] * 3
    answers = {
        number: Answered(
            token_ids=TOKENS[number], acceptance=statistics[number], first=first[number], rest=(*rests, 0.0)[number]
        )
        for number in TOKENS
    }
    return Measured(times=times, answers=answers, steps_alone=steps)


@pytest.fixture
def plain() -> Measured:
    times = Times(steps=18, rows=18, steps_wall=3.6, steps_device=2.7, prompts_wall=0.9, prompts_device=0.8)
    return measured(times, (2.4, 1.2), [0.2, 0.9, 0.1])


@pytest.fixture
def drafting() -> Measured:
    """12 tokens in 4 steps, 6 in 4."""
    times = Times(steps=8, rows=8, steps_wall=2.0, steps_device=1.6, prompts_wall=0.9, prompts_device=0.8)
    return measured(times, (1.2, 0.8), [0.25, 0.25, 9.0], [2, 2, 2, 2], [0, 1, 0, 1], [])


@pytest.fixture
def found(plain: Measured, drafting: Measured) -> Report:
    return report({Case(1, 2): drafting, Case(1, 0): plain}, ASKED, {"what": "this"})


def test_a_case_is_compared_with_width_0_of_its_batch(found: Report) -> None:
    base, case = found.cases
    assert (base.width, base.speedup, base.predicted_speedup, base.geometric_mean_speedup) == (0, 1.0, 1.0, 1.0)
    assert base.tokens_per_second == pytest.approx(18 / 3.6)
    assert case.tokens_per_second == pytest.approx(18 / 2.0)
    assert case.speedup == pytest.approx(1.8)
    assert case.end_to_end_tokens_per_second == pytest.approx(21 / 2.9)
    assert case.geometric_mean_speedup == pytest.approx((2.0 * 1.5) ** 0.5)
    assert (case.prompts, case.tokens, case.rows_per_step) == (3, 21, 1.0)


def test_prediction_is_tokens_a_step_by_what_a_step_costs(found: Report) -> None:
    _, case = found.cases
    assert case.tokens_per_step == pytest.approx(18 / 8)
    assert case.cost_ratio == pytest.approx(0.25 / 0.2)
    assert case.predicted_speedup == pytest.approx(18 / 8 / 1.25)


def test_milliseconds_are_of_device_and_host(found: Report) -> None:
    _, case = found.cases
    assert [case.step_ms, case.device_ms, case.host_ms] == pytest.approx([250.0, 200.0, 50.0])
    assert [case.ttft_ms, case.prefill_ms] == pytest.approx([300.0, 300.0])


def test_without_device_times_there_is_no_split(plain: Measured, drafting: Measured) -> None:
    drafting.times.unmeasured = 1
    _, case = report({Case(1, 0): plain, Case(1, 2): drafting}, ASKED, {}).cases
    assert (case.device_ms, case.host_ms) == (None, None)


def test_acceptance_is_of_all_answers_by_position(found: Report) -> None:
    acceptance = found.cases[1].acceptance
    assert acceptance["acceptance_length_without_bonus"] == pytest.approx(10 / 8)
    assert acceptance["joint_acceptance_per_position"] == pytest.approx([6 / 8, 4 / 8])
    assert acceptance["conditional_acceptance_per_position"] == pytest.approx([6 / 8, 4 / 6])


def test_categories_are_compared_by_their_own_answers(found: Report) -> None:
    rows = {(row.category, row.width): row for row in found.categories}
    assert rows.keys() == {("chat", 0), ("chat", 2), ("code", 0), ("code", 2)}
    assert rows["chat", 2].prompts == 2
    assert rows["chat", 2].tokens_per_second == pytest.approx(12 / 1.2)
    assert rows["chat", 2].speedup == pytest.approx(2.0)
    assert rows["code", 2].speedup == pytest.approx(1.5)
    assert rows["code", 2].tokens_per_step == pytest.approx(1.5)


def test_the_fastest_width_of_each_batch_is_recommended(plain: Measured, drafting: Measured) -> None:
    # Batch 4: the same measurements the other way round.
    cases = {Case(1, 0): plain, Case(1, 2): drafting, Case(4, 0): drafting, Case(4, 2): plain}
    found = report(cases, ASKED, {})
    assert [one.sentence() for one in found.recommendations] == [
        "Batch 1: width 2 is fastest, 1.80 times as fast as width 0.",
        "Batch 4: width 0 is fastest: no speculation pays.",
    ]
    assert {row.category for row in found.categories} == {"chat", "code"}


def test_equal_outputs_are_said_to_be_equal(found: Report) -> None:
    assert found.outputs.sentence().startswith("Outputs are equal, token for token, at every width and batch size (3 ")
    found.outputs.check()


@pytest.mark.parametrize(("tokens", "position"), [((20, 21, 9), 2), (tuple(range(20, 29)), 7), ((20,), 1)])
def test_an_output_that_differs_is_a_failure_that_names_it(
    plain: Measured, drafting: Measured, tokens: tuple[int, ...], position: int
) -> None:
    changed = drafting.answers[1]
    drafting.answers[1] = Answered(
        token_ids=tokens, acceptance=changed.acceptance, first=changed.first, rest=changed.rest
    )
    outputs = report({Case(1, 0): plain, Case(1, 2): drafting}, ASKED, {}).outputs
    said = f"1 of 3 outputs differ .* the first is prompt q1 at batch 1, width 2, from token {position} on"
    with pytest.raises(EngineError, match=said):
        outputs.check()


def test_all_of_it_is_json(found: Report) -> None:
    written = json.loads(json.dumps(found.to_json()))
    assert written["about"] == {"what": "this"}
    assert written["cases"][1]["predicted_speedup"] == found.cases[1].predicted_speedup
    assert written["outputs"] == {"equal": True, "compared": 3, "differences": []}
