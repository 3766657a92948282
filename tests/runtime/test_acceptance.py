import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.runtime.acceptance import AcceptanceStatistics

PASSES = st.lists(st.integers(1, 5).flatmap(lambda width: st.tuples(st.integers(0, width), st.just(width))))


def counted(passes: list[tuple[int, int]]) -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for accepted, width in passes:
        statistics.add(accepted, width)
    return statistics


def test_counts_and_rates_equal_those_made_by_hand() -> None:
    statistics = counted([(3, 3), (0, 3), (1, 3), (2, 3)])
    assert statistics.verifications == 4
    assert statistics.drafted == 12
    assert statistics.accepted == 6
    assert statistics.output_tokens == 10
    assert statistics.acceptance_rate == 6 / 12
    assert statistics.acceptance_length == 6 / 4
    assert statistics.mean_tokens_per_step == 10 / 4
    assert statistics.accepted_per_position == [3, 2, 1]
    assert statistics.joint_acceptance_per_position == (3 / 4, 2 / 4, 1 / 4)
    assert statistics.conditional_acceptance_per_position == (3 / 4, 2 / 3, 1 / 2)


def test_a_position_is_only_measured_by_passes_that_verified_it() -> None:
    statistics = counted([(1, 1), (1, 1), (2, 2), (0, 2)])
    assert statistics.drafted == 6
    assert statistics.joint_acceptance_per_position == (3 / 4, 1 / 2)
    assert statistics.conditional_acceptance_per_position == (3 / 4, 1 / 1)


def test_a_position_never_reached_has_rate_zero() -> None:
    assert counted([(0, 2)]).conditional_acceptance_per_position == (0.0, 0.0)


def test_a_pass_cut_by_a_stop_counts_what_was_committed() -> None:
    statistics = AcceptanceStatistics()
    statistics.add(2, 4, committed=2)  # d1, d2 = EOS: no bonus token
    assert statistics.output_tokens == 2
    assert statistics.mean_tokens_per_step == 2.0
    assert statistics.acceptance_length == 2.0
    assert statistics.drafted == 4


def test_the_log_line_is_the_documents_example() -> None:
    # 145/160 at 1.45 per pass: 60 passes verified two drafts, 40 verified one.
    statistics = counted([(2, 2)] * 50 + [(1, 2)] * 8 + [(0, 2)] * 2 + [(1, 1)] * 37 + [(0, 1)] * 3)
    assert statistics.log_line(2) == (
        "Draft Tokens: 145/160 (90.62%) accepted, Acceptance Len: 1.45 / 2 toks "
        "(accepted drafts/step; 2.45 toks/step incl bonus), Per-Pos: [p0=95%, p1=86%] |"
    )


def test_the_log_line_is_empty_when_nothing_was_drafted() -> None:
    assert AcceptanceStatistics().log_line(3) == ""


def test_rates_are_zero_when_nothing_was_drafted() -> None:
    statistics = AcceptanceStatistics()
    assert statistics.acceptance_rate == 0.0
    assert statistics.acceptance_length == 0.0
    assert statistics.mean_tokens_per_step == 0.0
    assert statistics.joint_acceptance_per_position == ()


@settings(deadline=None, max_examples=60)
@given(left=PASSES, right=PASSES)
def test_merging_two_equals_counting_all_passes(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    assert counted(left).merge(counted(right)) == counted(left + right)


def test_merging_changes_neither_of_the_two() -> None:
    left, right = counted([(1, 2)]), counted([(3, 3)])
    left.merge(right).add(1, 1)
    assert left == counted([(1, 2)])
    assert right == counted([(3, 3)])


@pytest.mark.parametrize(("accepted", "width"), [(0, 0), (-1, 2), (3, 2), (0, -1)])
def test_an_impossible_pass_is_refused(accepted: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"accept {accepted} of {width} drafts"):
        AcceptanceStatistics().add(accepted, width)


def test_the_json_form_names_both_definitions_of_length_and_of_rate_per_position() -> None:
    report = counted([(2, 2), (1, 2)]).to_json()
    assert json.loads(json.dumps(report)) == {
        "verifications": 2,
        "drafted_tokens": 4,
        "accepted_tokens": 3,
        "output_tokens": 5,
        "acceptance_rate": 0.75,
        "acceptance_length_without_bonus": 1.5,
        "acceptance_length_with_bonus": 2.5,
        "accepted_per_position": [2, 1],
        "joint_acceptance_per_position": [1.0, 0.5],
        "conditional_acceptance_per_position": [1.0, 0.5],
    }
