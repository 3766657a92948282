"""Conversations survive kills, and land on the same side of the split for good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.distill.conversations import (
    Conversation,
    ConversationFile,
    ConversationReader,
    distinct_share,
    read_conversations,
    split,
    usable,
)
from graphspec.errors import ConfigError


def conversation(index: int, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = tuple(range(9))) -> Conversation:
    return Conversation(
        index=index, seed=1, temperature=0.0, category="chat", prompt=prompt or (7, index), answer=answer
    )


def write(path: Path, *conversations: Conversation) -> None:
    file = ConversationFile(path)
    for each in conversations:
        file.append(each)
    file.close()


def test_what_is_written_is_read_back_in_order_of_index_from_every_file(tmp_path: Path) -> None:
    write(tmp_path / "conversations-1-of-2.jsonl", conversation(3), conversation(1))
    write(tmp_path / "conversations-0-of-2.jsonl", conversation(2), conversation(0))
    assert read_conversations(tmp_path) == [conversation(index) for index in range(4)]


def test_an_index_written_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "conversations-0-of-1.jsonl", conversation(5))
    write(tmp_path / "conversations-0-of-2.jsonl", conversation(5))
    assert read_conversations(tmp_path) == [conversation(5)]


def test_a_line_cut_off_by_a_kill_is_dropped_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "conversations.jsonl"
    write(path, conversation(0), conversation(1))
    path.write_bytes(path.read_bytes()[:-5])
    assert read_conversations(tmp_path) == [conversation(0)]
    write(path, conversation(2))
    assert read_conversations(tmp_path) == [conversation(0), conversation(2)]


def test_a_reader_reads_only_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "conversations-0-of-2.jsonl", tmp_path / "conversations-1-of-2.jsonl"
    write(one, conversation(0), conversation(2))
    reader = ConversationReader(tmp_path)
    assert reader.read() == [conversation(0), conversation(2)]
    assert reader.read() == []
    write(one, conversation(4))
    write(other, conversation(1), conversation(2))
    whole = one.read_bytes()
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))  # type: ignore[func-returns-value]
    one.write_bytes(whole + whole[:20])
    assert reader.read() == [conversation(4), conversation(1)]
    assert len(parsed) == 3
    write(one, conversation(6))  # what a kill left half written is cut off first
    assert reader.read() == [conversation(6)]


@pytest.mark.parametrize("line", ["{}", "5", "nonsense", json.dumps({"prompt": ["a"], "answer": []})])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "conversations.jsonl"
    write(path, conversation(0))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"conversations\.jsonl, line 2, is no conversation"):
        read_conversations(tmp_path)


def test_short_repeated_and_looping_conversations_are_not_used() -> None:
    good, again = conversation(0, prompt=(1, 2)), conversation(1, prompt=(1, 2))
    short = conversation(2, answer=(1, 2, 3))
    loop = conversation(3, answer=(1, 2, 3, 4) * 20)
    assert usable([good, again, short, loop]) == [good]


def test_the_share_of_distinct_runs() -> None:
    assert distinct_share((1, 2, 3, 4, 5)) == 1.0
    assert distinct_share((1, 1, 1, 1, 1, 1)) == pytest.approx(1 / 3)
    assert distinct_share((1,)) == 1.0


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(0, 10_000))
def test_a_conversation_keeps_its_side_whatever_else_there_is(indices: set[int], another: int) -> None:
    few = [conversation(index) for index in sorted(indices)]
    before, after = split(few, 0.3), split([*few, conversation(another)], 0.3)
    assert set(before[0]) <= set(after[0])
    assert set(before[1]) <= set(after[1])
    assert set(before[0]) | set(before[1]) == set(few)


def test_about_the_share_asked_for_is_held_out() -> None:
    training, held_out = split([conversation(index) for index in range(2000)], 0.1)
    assert 150 < len(held_out) < 250
    assert not split(training, 0.0)[1]
