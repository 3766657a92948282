"""What a user may set about speculation: defaults, rules and messages."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from graphspec.errors import ConfigError
from graphspec.speculative_config import (
    SpeculativeConfig,
)
from graphspec.verify_width import VerifyWidthRange, scheduled_width

MAX_DEFAULTS: dict[str, object] = {
    "speculative_method": None,
    "num_speculative_tokens": None,
    "num_speculative_tokens_per_batch_size": None,
    "adaptive_speculative_widths": None,
    "adaptive_speculative_min_batch_size": 1,
    "num_speculative_tokens_mixed_batch": None,
    "synthetic_acceptance_rate": None,
    "use_relaxed_acceptance_for_thinking": False,
    "relaxed_topk": 10,
    "relaxed_delta": 0.6,
    "use_greedy_acceptance": False,
    "draft_proposal": "argmax",
    "draft_head_parallelism": "device0",
    "draft_probs_layout": "device0",
    "logit_penalties": False,
}


def ranges(*triples: tuple[int, int, int]) -> list[dict[str, int]]:
    return [{"batch_start": s, "batch_end": e, "num_tokens": n} for s, e, n in triples]


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(values)
    message = str(caught.value)
    assert "\n" not in message
    with pytest.raises(ValidationError):
        SpeculativeConfig.model_validate({k: v for k, v in values.items() if v is not None})
    return message


def test_the_fields_and_defaults_are_those_of_max_and_the_ngram_range() -> None:
    ours = {"ngram_min": 1, "ngram_max": 3}
    assert SpeculativeConfig().model_dump() == MAX_DEFAULTS | ours


def test_a_config_cannot_be_changed() -> None:
    config = SpeculativeConfig(speculative_method="eagle")
    with pytest.raises(ValidationError, match="frozen"):
        config.num_speculative_tokens = 3


@pytest.mark.parametrize(
    ("method", "tokens"),
    [
        ("eagle", 2),
        ("eagle3", 2),
        ("mtp", 2),
        ("standalone", 4),
        ("ngram", 4),
        ("dflash", None),
        ("dflash2", None),
        ("dspark", None),
        ("medusa", None),
    ],
)
def test_methods_that_draft_token_by_token_have_a_default_width(method: str, tokens: int | None) -> None:
    config = SpeculativeConfig.parse({"speculative_method": method})
    assert config.num_speculative_tokens == tokens
    assert not config.names_draft_width


def test_a_named_width_is_told_from_a_default_of_the_same_size() -> None:
    default = SpeculativeConfig(speculative_method="eagle")
    named = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=2)
    assert named.names_draft_width
    assert not SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=None).names_draft_width
    assert default == named


def test_draft_width_is_the_width_or_says_why_it_is_unknown() -> None:
    assert SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=5).draft_width == 5
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        _ = SpeculativeConfig(speculative_method="dflash").draft_width
    with pytest.raises(ConfigError, match="no speculative_method"):
        _ = SpeculativeConfig().draft_width


@pytest.mark.parametrize(
    ("method", "true"),
    [
        (None, set()),
        ("eagle", {"is_eagle"}),
        ("eagle3", {"is_eagle"}),
        ("mtp", {"is_mtp"}),
        ("dflash", {"is_dflash", "is_block_draft"}),
        ("dflash2", {"is_dflash", "is_dflash2", "is_block_draft"}),
        ("dspark", {"is_dspark", "is_block_draft"}),
        ("standalone", set()),
        ("ngram", set()),
        ("medusa", {"is_block_draft"}),
    ],
)
def test_each_method_answers_what_it_is(method: str | None, true: set[str]) -> None:
    config = SpeculativeConfig.parse({"speculative_method": method})
    predicates = ("is_eagle", "is_mtp", "is_dflash", "is_dflash2", "is_dspark", "is_block_draft")
    assert {name for name in predicates if getattr(config, name)()} == true


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("speculative_method", "egle", "'eagle', 'eagle3', 'mtp'"),
        (
            "num_speculative_tokens",
            0,
            "at least 1, got 0; every bundle can answer without speculation: `graphspec generate --no-spec",
        ),
        ("num_speculative_tokens", -3, "at least 1"),
        ("num_speculative_tokens", 129, "num_speculative_tokens must be at most 128, got 129"),
        ("num_speculative_tokens", True, "whole number"),
        ("num_speculative_tokens", "many", "valid integer"),
        ("num_speculative_tokens", 2.5, "valid integer"),
        ("num_speculative_tokens_mixed_batch", -1, "at least 0, got -1"),
        ("adaptive_speculative_min_batch_size", 0, "at least 1, got 0"),
        ("synthetic_acceptance_rate", 1.01, "between 0 and 1, got 1.01"),
        ("synthetic_acceptance_rate", -0.1, "between 0 and 1"),
        ("synthetic_acceptance_rate", float("nan"), "finite"),
        ("relaxed_topk", 0, "at least 1"),
        ("relaxed_delta", 1.5, "between 0 and 1"),
        ("relaxed_delta", -0.5, "between 0 and 1"),
        ("draft_proposal", "greedy", "'argmax' or 'sampled'"),
        ("draft_head_parallelism", "device1", "'device0' or 'replica'"),
        ("draft_probs_layout", "device1", "'device0' or 'replica'"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: object, says: str) -> None:
    message = refusal(**{"speculative_method": "eagle", field: value})
    assert field in message
    assert says in message


@pytest.mark.parametrize("rate", [0, 0.0, 1, 1.0])
def test_both_ends_of_a_rate_are_allowed(rate: float) -> None:
    config = SpeculativeConfig(speculative_method="eagle", synthetic_acceptance_rate=rate)
    assert config.synthetic_acceptance_rate == rate


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    message = refusal(speculative_method="eagle", num_speculative_token=3)
    assert message == "num_speculative_token is not a known setting; did you mean num_speculative_tokens?"


def test_every_bad_field_is_named_at_once() -> None:
    message = refusal(speculative_method="eagle", num_speculative_tokens=0, relaxed_topk=0)
    assert "num_speculative_tokens" in message
    assert "relaxed_topk" in message


def test_a_field_set_while_speculation_is_off_is_refused() -> None:
    for field, value in {
        "num_speculative_tokens": 3,
        "draft_proposal": "sampled",
        "logit_penalties": True,
        "ngram_max": 4,
        "num_speculative_tokens_mixed_batch": 0,
    }.items():
        message = refusal(**{field: value})
        assert message.startswith(f"{field} set without speculative_method")
        assert "ngram" in message


def test_none_leaves_a_field_at_its_default() -> None:
    assert SpeculativeConfig.parse({"speculative_method": None, "relaxed_topk": None}) == SpeculativeConfig()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"speculative_method": "eagle"},
        {"speculative_method": "ngram", "ngram_max": 8},
        {
            "speculative_method": "mtp",
            "num_speculative_tokens": 4,
            "num_speculative_tokens_per_batch_size": ranges((1, 2, 4), (3, 8, 0)),
        },
        {"speculative_method": "dspark", "adaptive_speculative_widths": "1,7"},
    ],
)
def test_a_dumped_config_reads_back(values: dict[str, object]) -> None:
    config = SpeculativeConfig.parse(values)
    assert SpeculativeConfig.model_validate(config.model_dump()) == config
    assert SpeculativeConfig.model_validate_json(config.model_dump_json()) == config


EXCLUSIVE = {
    "draft_proposal": "sampled",
    "use_relaxed_acceptance_for_thinking": True,
    "use_greedy_acceptance": True,
    "synthetic_acceptance_rate": 0.5,
}


@pytest.mark.parametrize("first", EXCLUSIVE)
@pytest.mark.parametrize("second", EXCLUSIVE)
def test_two_acceptance_rules_exclude_each_other(first: str, second: str) -> None:
    values = {name: EXCLUSIVE[name] for name in {first, second}}
    if first == second:
        assert SpeculativeConfig.parse({"speculative_method": "eagle", **values})
        return
    message = refusal(speculative_method="eagle", **values)
    assert first in message
    assert second in message


def test_a_schedule_and_adaptive_widths_exclude_each_other() -> None:
    message = refusal(
        speculative_method="eagle",
        adaptive_speculative_widths="1,2",
        num_speculative_tokens_per_batch_size=ranges((1, 4, 1)),
    )
    assert "both choose the verify width" in message


@pytest.mark.parametrize(
    ("field", "value", "needs"),
    [
        ("relaxed_topk", 5, "use_relaxed_acceptance_for_thinking"),
        ("relaxed_delta", 0.2, "use_relaxed_acceptance_for_thinking"),
        ("adaptive_speculative_min_batch_size", 4, "adaptive_speculative_widths"),
        ("ngram_min", 2, "speculative_method ngram"),
        ("ngram_max", 5, "speculative_method ngram"),
    ],
)
def test_a_setting_that_could_have_no_effect_is_refused(field: str, value: object, needs: str) -> None:
    message = refusal(**{"speculative_method": "eagle", field: value})
    assert message == f"{field} has no effect without {needs}; set that too or drop it"


def test_those_settings_are_fine_where_they_have_an_effect() -> None:
    SpeculativeConfig(
        speculative_method="mtp", use_relaxed_acceptance_for_thinking=True, relaxed_topk=5, relaxed_delta=0.2
    )
    SpeculativeConfig(
        speculative_method="mtp", adaptive_speculative_widths="all", adaptive_speculative_min_batch_size=4
    )


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 3), (8, 8), (1, 8)])
def test_an_ngram_range_within_one_and_eight_is_allowed(shortest: int, longest: int) -> None:
    config = SpeculativeConfig(speculative_method="ngram", ngram_min=shortest, ngram_max=longest)
    assert (config.ngram_min, config.ngram_max) == (shortest, longest)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (1, 9), (-1, -1)])
def test_another_ngram_range_is_refused_with_both_numbers(shortest: int, longest: int) -> None:
    message = refusal(speculative_method="ngram", ngram_min=shortest, ngram_max=longest)
    assert f"ngram_min {shortest} and ngram_max {longest}" in message


def test_a_schedule_is_sorted_and_may_be_json_text() -> None:
    triples = ((9, 16, 1), (1, 4, 3))
    text = json.dumps(ranges(*triples))
    config = SpeculativeConfig.parse({"speculative_method": "eagle", "num_speculative_tokens_per_batch_size": text})
    assert config.verify_width_schedule == [(1, 4, 3), (9, 16, 1)]
    assert SpeculativeConfig(speculative_method="eagle").verify_width_schedule is None


def test_a_schedule_may_be_given_as_objects() -> None:
    line = VerifyWidthRange(batch_start=1, batch_end=1, num_tokens=1)
    config = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens_per_batch_size=(line,))
    assert config.verify_width_schedule == [(1, 1, 1)]


FORM = '[{"batch_start": 1, "batch_end": 8, "num_tokens": 3}, …]'


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ([], "empty"),
        (ranges((2, 4, 1)), "starts at batch size 2; it must start at 1"),
        (ranges((0, 4, 1)), "0 to 4 are not a range"),
        (ranges((1, 4, 1), (9, 5, 1)), "9 to 5 are not a range"),
        (ranges((1, 4, -1)), "ask to verify -1 tokens"),
        (ranges((1, 4, 1), (4, 8, 1)), "1 to 4 and 4 to 8 overlap"),
        (ranges((1, 8, 1), (2, 3, 1)), "overlap"),
        ([{"batch_start": 1, "batch_end": 2}], f"num_tokens is missing; write it as {FORM}"),
        ([{"batch_start": 1, "batch_end": 2, "num_token": 2, "num_tokens": 1}], "did you mean num_tokens?"),
        ("[{", "not valid JSON"),
        ("3", f"3 is not a list of ranges; write it as {FORM}"),
        (3, f"3 is not a list of ranges; write it as {FORM}"),
        ([1, 2], f"[1, 2] is not a list of ranges; write it as {FORM}"),
        ('{"batch_start": 1}', f"is not a list of ranges; write it as {FORM}"),
        ("1,8,3", f"write it as {FORM}"),
    ],
)
def test_an_unusable_schedule_is_refused(schedule: object, says: str) -> None:
    message = refusal(speculative_method="eagle", num_speculative_tokens_per_batch_size=schedule)
    assert says in message
    assert message.startswith("num_speculative_tokens_per_batch_size")


def brute_force_width(schedule: list[tuple[int, int, int]], batch_size: int, num_drafts: int) -> int:
    """Walks up from batch size 1, changing the count only inside a range."""
    width = -1
    for size in range(1, batch_size + 1):
        for start, end, count in schedule:
            if start <= size <= end:
                width = count
    return min(width, num_drafts)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_gaps_and_the_tail_carry_the_previous_count_forward(data: st.DataObject) -> None:
    edges = sorted(data.draw(st.sets(st.integers(2, 30), min_size=1, max_size=7)))
    edges = [1, *edges] if len(edges) % 2 else [1, *edges, 31]
    counts = data.draw(st.lists(st.integers(0, 6), min_size=len(edges) // 2, max_size=len(edges) // 2))
    schedule = [(edges[2 * i], edges[2 * i + 1], count) for i, count in enumerate(counts)]
    for batch_size in range(1, 40):
        assert scheduled_width(schedule, batch_size, 4) == brute_force_width(schedule, batch_size, 4)


@pytest.mark.parametrize(
    ("text", "widths"),
    [("1,3,5", (1, 3, 5)), (" 5, 1 ,5", (1, 5)), ("all", (1, 2, 3, 4, 5)), ("5", (5,))],
)
def test_adaptive_widths_are_sorted_and_without_repeats(text: str, widths: tuple[int, ...]) -> None:
    config = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=5, adaptive_speculative_widths=text)
    assert config.adaptive_widths == widths


@pytest.mark.parametrize("text", ["", "1,,3", "1;3", "two", "1.5", "-1", "1_0", "²", "all,1", ","])
def test_what_is_no_list_of_widths_is_refused(text: str) -> None:
    message = refusal(speculative_method="dflash", adaptive_speculative_widths=text)
    assert f"adaptive_speculative_widths: {text!r} is not a list of widths" in message


@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_width_0_cannot_be_adaptive(method: str) -> None:
    assert "never widen" in refusal(speculative_method=method, adaptive_speculative_widths="0,1")


def test_a_width_above_the_draft_width_is_refused_once_that_is_known() -> None:
    message = refusal(speculative_method="eagle", num_speculative_tokens=3, adaptive_speculative_widths="1,4")
    assert "width 4 cannot be verified when 3 tokens are drafted" in message
    assert "adaptive_speculative_widths" in refusal(speculative_method="eagle", adaptive_speculative_widths="1,3")
    block = SpeculativeConfig(speculative_method="dflash", adaptive_speculative_widths="1,40")
    with pytest.raises(ConfigError):
        _ = block.adaptive_widths


@pytest.mark.parametrize("name", ["config.json", "config.toml"])
def test_a_file_or_one_section_of_it_can_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    body = (
        '{"speculative": {"speculative_method": "eagle", "num_speculative_tokens": 3}, "port": 8000}'
        if name.endswith("json")
        else 'port = 8000\n[speculative]\nspeculative_method = "eagle"\nnum_speculative_tokens = 3\n'
    )
    path.write_text(body)
    expected = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=3)
    assert SpeculativeConfig.from_file(path, "speculative") == expected
    with pytest.raises(ConfigError, match=r"no section 'spec'; sections in it: speculative"):
        SpeculativeConfig.from_file(path, "spec")
    with pytest.raises(ConfigError, match="port is not a known setting"):
        SpeculativeConfig.from_file(path)


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("a.yaml", "speculative_method: eagle", r"\.json or \.toml, not '\.yaml'"),
        ("plain", "{}", "not 'without a suffix'"),
        ("a.json", "{", "not valid JSON"),
        ("a.toml", "=", "not valid TOML"),
        ("a.json", "[]", "holds a list"),
        ("a.json", '{"num_speculative_tokens": 0, "speculative_method": "eagle"}', "at least 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, body: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(body)
    with pytest.raises(ConfigError, match=says) as caught:
        SpeculativeConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.json"):
        SpeculativeConfig.from_file(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "values",
    [{}, {"num_speculative_tokens": 5}, {"ngram_max": 2, "logit_penalties": True}, {"relaxed_topk": 3}],
    ids=str,
)
def test_a_file_may_leave_the_method_to_the_pair(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"fast": {**values, "synthetic_acceptance_rate": None}}))
    assert SpeculativeConfig.settings_in_file(path, "fast") == values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        ({"num_tokens": 3}, "num_tokens is not a known setting"),
        ({"relaxed_topk": "many"}, "relaxed_topk: input should be a valid integer"),
    ],
)
def test_a_value_of_a_file_that_is_wrong_by_itself_is_told_with_the_file(
    tmp_path: Path, values: dict[str, object], says: str
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.settings_in_file(path)
    assert str(caught.value).startswith(f"{path}: {says}")
