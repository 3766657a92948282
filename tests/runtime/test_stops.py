from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.stops import Cut, StopRules, StopTracker, find_stop, safe_length
from graphspec.runtime.text import IncrementalDetokenizer, Tokenizer

EOS, STOP = 0, 1
PIECES = ["</s>", "<stop>", "a", "b", "c", "ab", "bc", "abc", "cab", " ", "x世"]
BYTES = len(PIECES)


@cache
def tokenizer() -> Tokenizer:
    """Words of a few letters, and single bytes: everything that can straddle a stop string."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    vocabulary |= {f"<0x{value:02X}>": BYTES + value for value in range(256)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(["</s>"])
    return Tokenizer({"tokenizer.json": raw.to_str().encode()})


def ids(*pieces: str | bytes) -> list[int]:
    """Token ids by name; bytes become one token each."""
    groups = ([BYTES + b for b in p] if isinstance(p, bytes) else [PIECES.index(p)] for p in pieces)
    return [token_id for group in groups for token_id in group]


def tracker(**rules: Any) -> StopTracker:
    return StopTracker(StopRules(**rules), IncrementalDetokenizer(tokenizer()))


def outcome(pushes: Sequence[Sequence[int]], rules: StopRules) -> tuple[int, str | None, str | int | None, str, str]:
    """(tokens kept, reason, matched, text, text streamed) after all pushes; streamed text is checked on the
    way: it only ever grows towards the final text."""
    followed = StopTracker(rules, IncrementalDetokenizer(tokenizer()))
    streamed = ""
    num_tokens = 0
    for pushed in pushes:
        now = followed.push(pushed)
        streamed += followed.take_text()
        num_tokens += len(pushed) if now is None else now.num_tokens
    assert followed.text.startswith(streamed)
    assert num_tokens == followed.num_tokens
    cut = followed.cut
    if cut is None:
        return num_tokens, None, None, followed.text, streamed
    assert len(followed.text) == cut.text_length
    assert streamed == followed.text
    return num_tokens, cut.reason, cut.matched, followed.text, streamed


def reference(token_ids: list[int], rules: StopRules) -> tuple[int, str | None, str | int | None, str]:
    """The rules as their sentence says: at each token in turn, decode everything and look."""
    if rules.max_new_tokens == 0:
        return 0, "length", None, ""
    examined = 0
    for count in range(1, len(token_ids) + 1):
        text = tokenizer().decode(token_ids[:count])
        whole = text.rstrip("\ufffd")
        may_stop = count > rules.min_tokens
        if may_stop and token_ids[count - 1] in rules.stop_token_ids:
            return count, "stop", token_ids[count - 1], tokenizer().decode(token_ids[: count - 1])
        if may_stop and not rules.ignore_eos and token_ids[count - 1] in rules.eos_token_ids:
            return count, "stop", token_ids[count - 1], tokenizer().decode(token_ids[: count - 1])
        ends = [
            (end, end - len(string), string)
            for string in rules.stop
            for end in range(max(examined + 1, len(string)), len(whole) + 1)
            if whole[end - len(string) : end] == string
        ]
        if may_stop and ends:
            end, start, string = min(ends)
            return count, "stop", string, whole[: end if rules.include_stop_str_in_output else start]
        examined = max(examined, len(whole))
        if count == rules.max_new_tokens:
            return count, "length", None, text
    return len(token_ids), None, None, tokenizer().decode(token_ids)


PARTS = st.one_of(
    st.integers(EOS, BYTES - 1).map(lambda token_id: [token_id]),
    st.sampled_from(["世".encode(), "é".encode(), b"\xff", "世".encode()[:2], b"ab"]).map(ids),
)
SEQUENCES = st.lists(PARTS, max_size=12).map(lambda parts: [token_id for part in parts for token_id in part])
RULES = st.builds(
    StopRules,
    eos_token_ids=st.just((EOS,)),
    stop_token_ids=st.sampled_from([(), (STOP,), (STOP, 9)]),
    stop=st.lists(st.sampled_from(["bc", "ab", "abc", "ca", "aba", "世", "b世", "世世", "é"]), max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    max_new_tokens=st.one_of(st.none(), st.integers(0, 12)),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
)


@settings(deadline=None, max_examples=100)
@given(token_ids=SEQUENCES, rules=RULES, data=st.data())
def test_every_split_into_pushes_has_the_result_of_one_token_at_a_time(
    token_ids: list[int], rules: StopRules, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    split = [token_ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    singly = outcome([[token_id] for token_id in token_ids], rules)
    assert outcome(split, rules) == singly
    assert outcome([token_ids], rules) == singly


@settings(deadline=None, max_examples=100)
@given(token_ids=SEQUENCES, rules=RULES)
def test_the_result_is_that_of_decoding_everything_at_every_token(token_ids: list[int], rules: StopRules) -> None:
    num_tokens, reason, matched, text, _ = outcome([token_ids], rules)
    expected = reference(token_ids, rules)
    assert (num_tokens, reason, matched) == expected[:3]
    # Without an end, text that could still change is not given yet.
    assert text == expected[3] if reason else expected[3].startswith(text)


def test_a_stop_token_inside_a_block_wins_over_the_length_behind_it() -> None:
    followed = tracker(eos_token_ids=(EOS,), max_new_tokens=5)
    cut = followed.push([*ids("a", "b"), EOS, *ids("c", "c", "c")])
    assert cut == Cut(num_tokens=3, reason="stop", matched=EOS, text_length=2)
    assert followed.text == "ab"


@pytest.mark.parametrize("block", range(1, 6))
@pytest.mark.parametrize("offset", range(5))
def test_a_stop_string_is_found_at_every_offset_of_a_block(block: int, offset: int) -> None:
    token_ids = ids(*["a"] * offset, "b", "c", "a", "a")
    pushes = [token_ids[start : start + block] for start in range(0, len(token_ids), block)]
    rules = StopRules(stop=("bc",))
    assert outcome(pushes, rules)[:4] == (offset + 2, "stop", "bc", "a" * offset)


def test_a_stop_string_inside_one_token_cuts_its_text() -> None:
    followed = tracker(stop=("b",))
    assert followed.push(ids("a", "abc", "c")) == Cut(num_tokens=2, reason="stop", matched="b", text_length=2)
    assert followed.text == "aa"


def test_the_stop_string_that_ends_first_wins_whatever_their_order() -> None:
    for stop in (("abc", "b"), ("b", "abc")):
        assert find_stop("xabc", stop) == (2, "b")
    for stop in (("abc", "bc"), ("bc", "abc")):
        assert find_stop("xabc", stop) == (1, "abc")
    assert find_stop("xab", ("abc",)) is None
    assert find_stop("abab", ("ab",), num_checked=2) == (2, "ab")


def test_whichever_of_stop_string_and_stop_token_comes_first_wins() -> None:
    rules = StopRules(stop=("ab",), stop_token_ids=(STOP,))
    assert outcome([[*ids("a", "b"), STOP]], rules)[:4] == (2, "stop", "ab", "")
    assert outcome([[*ids("a"), STOP, *ids("b")]], rules)[:4] == (2, "stop", STOP, "a")


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop() -> None:
    assert outcome([ids("a", "b")], StopRules(stop=("ab",), max_new_tokens=2))[1] == "stop"


def test_the_stop_string_is_part_of_the_text_only_when_asked() -> None:
    token_ids = ids("c", "ab", "c")
    assert outcome([token_ids], StopRules(stop=("a",)))[3] == "c"
    assert outcome([token_ids], StopRules(stop=("a",), include_stop_str_in_output=True))[3] == "ca"


@pytest.mark.parametrize("limit", range(1, 9))
def test_exactly_the_tokens_allowed_are_kept_out_of_blocks_of_three(limit: int) -> None:
    followed = tracker(max_new_tokens=limit)
    kept = 0
    for _ in range(4):
        cut = followed.push(ids("a", "a", "a"))
        kept += 3 if cut is None else cut.num_tokens
    assert kept == limit
    assert followed.text == "a" * limit
    assert followed.cut is not None
    assert followed.cut.reason == "length"


def test_with_no_tokens_allowed_the_request_has_ended_before_it_begins() -> None:
    followed = tracker(max_new_tokens=0)
    assert followed.cut == Cut(num_tokens=0, reason="length", matched=None, text_length=0)
    assert followed.push(ids("a")) == followed.cut
    assert followed.text == ""


def test_tokens_that_come_late_change_nothing() -> None:
    followed = tracker(eos_token_ids=(EOS,))
    followed.push([*ids("a"), EOS])
    late = followed.push(ids("b", "c"))
    assert late == Cut(num_tokens=0, reason="stop", matched=EOS, text_length=1)
    assert (followed.text, followed.num_tokens) == ("a", 2)


@pytest.mark.parametrize("min_tokens", range(4))
def test_eos_within_the_minimum_is_a_token_like_any_other(min_tokens: int) -> None:
    rules = StopRules(eos_token_ids=(EOS,), min_tokens=min_tokens)
    assert outcome([[EOS] * 6], rules)[0] == min_tokens + 1


def test_a_stop_string_within_the_minimum_is_not_found_again_behind_it() -> None:
    rules = StopRules(stop=("ab",), min_tokens=2)
    assert outcome([ids("a", "b", "c")], rules)[1] is None
    assert outcome([ids("a", "b", "ab")], rules)[:4] == (3, "stop", "ab", "ab")
    # Nor is one that the next token could still have taken back.
    character = ids("世".encode())
    assert outcome([character, ids("a")], StopRules(stop=("世",), min_tokens=3))[1] is None
    # One that begins within the minimum and ends behind it counts.
    assert outcome([ids("c", "a", "b")], rules)[:4] == (3, "stop", "ab", "c")


def test_ignoring_eos_keeps_stop_tokens_and_stop_strings() -> None:
    rules = StopRules(eos_token_ids=(EOS,), stop_token_ids=(STOP,), stop=("bc",), ignore_eos=True)
    assert outcome([[EOS, *ids("a"), STOP]], rules)[:3] == (3, "stop", STOP)
    assert outcome([[EOS, *ids("bc")]], rules)[:3] == (2, "stop", "bc")


def test_a_part_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    followed = tracker(stop=("abc", "cc"))
    streamed = []
    for piece in ("a", "b", "a", "b", "b", "c", " ", "c", "c"):
        followed.push(ids(piece))
        streamed.append(followed.take_text())
    assert streamed == ["", "", "ab", "", "abb", "", "c ", "", ""]
    assert followed.text == "ababbc "


def test_a_part_held_back_comes_out_when_the_request_ends_otherwise() -> None:
    followed = tracker(stop=("abc",), max_new_tokens=2)
    followed.push(ids("a"))
    assert followed.take_text() == ""
    followed.push(ids("b"))
    assert followed.take_text() == "ab"
    assert followed.take_text() == ""


def test_nothing_is_held_back_when_the_stop_string_is_output_anyway() -> None:
    followed = tracker(stop=("abc",), include_stop_str_in_output=True)
    followed.push(ids("ab"))
    assert followed.take_text() == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("", ("ab",), 0), ("xa", ("ab",), 1), ("xab", ("abab", "b!"), 1), ("xab", (), 3), ("aa", ("aaa",), 0)],
)
def test_the_safe_length_leaves_the_longest_beginning_of_a_stop_string(
    text: str, stop: tuple[str, ...], length: int
) -> None:
    assert safe_length(text, stop) == length


def test_a_stop_character_made_of_byte_tokens_ends_the_request_with_its_last_byte() -> None:
    token_ids = ids("a", "世".encode(), "b")
    assert outcome([[token_id] for token_id in token_ids], StopRules(stop=("世",)))[:4] == (4, "stop", "世", "a")


def test_an_unfinished_character_is_part_of_the_text_when_the_request_ends() -> None:
    rules = StopRules(eos_token_ids=(EOS,))
    assert outcome([[*ids("a", "世".encode()[:2]), EOS]], rules)[3] == "a\ufffd\ufffd"
    assert outcome([ids("a", "世".encode())], StopRules(max_new_tokens=4))[3] == "a世"


def test_the_rules_of_a_request_are_its_parameters_and_the_room_there_is() -> None:
    params = SamplingParams(stop=("a",), stop_token_ids=(4,), min_tokens=2, max_new_tokens=9, ignore_eos=True)
    rules = StopRules.of(params, eos_token_ids=(EOS,), room=50)
    assert rules == StopRules(
        eos_token_ids=(EOS,), stop_token_ids=(4,), stop=("a",), min_tokens=2, max_new_tokens=9, ignore_eos=True
    )
    assert StopRules.of(params, eos_token_ids=(), room=3).max_new_tokens == 3
    assert StopRules.of(SamplingParams(), eos_token_ids=(), room=50).max_new_tokens == 50
    assert rules.ending_token_ids == {4}


@pytest.mark.parametrize(
    ("rules", "pieces", "reason"),
    [
        ({"eos_token_ids": (EOS,)}, ["a", "</s>"], None),
        ({"eos_token_ids": (EOS,), "stop_token_ids": (STOP,)}, ["a", "<stop>"], STOP),
        ({"eos_token_ids": (EOS,), "stop_token_ids": (EOS,), "ignore_eos": True}, ["</s>"], EOS),
        ({"stop": ("bc", "x")}, ["a", "b", "c"], "bc"),
        ({"max_new_tokens": 1}, ["a"], None),
        ({}, ["a"], None),
    ],
)
def test_what_the_caller_named_is_told_when_it_stops(rules: Any, pieces: list[str], reason: str | int | None) -> None:
    followed = tracker(**rules)
    followed.push(ids(*pieces))
    assert followed.stop_reason == reason


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(2, BYTES + 255), max_size=12), limit=st.integers(1, 12))
def test_text_ends_are_where_the_text_was_after_each_token(token_ids: list[int], limit: int) -> None:
    followed = tracker(max_new_tokens=limit)
    followed.push(token_ids)
    detokenizer, lengths, text = IncrementalDetokenizer(tokenizer()), list[int](), ""
    for count, token_id in enumerate(token_ids[:limit], start=1):
        text += detokenizer.push([token_id]) + (detokenizer.finish() if count == limit else "")
        lengths.append(len(text))
    assert followed.text_ends == lengths


def test_text_ends_never_go_back_at_a_stop_string() -> None:
    followed = tracker(stop=("bc",))
    followed.push(ids("a", "ab", "c"))
    assert followed.text == "aa"
    assert followed.text_ends == [1, 3, 4]
