"""The benchmark's own prompts, and files of others'."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from graphspec.errors import ConfigError
from graphspec.runtime.bench.prompts import BUILTIN, Prompt, in_turn, read_prompts


def test_our_own_are_eighty_of_six_categories() -> None:
    prompts = read_prompts(BUILTIN)
    counts = Counter(prompt.category for prompt in prompts)
    assert counts.keys() == {"chat", "code", "summarise", "rewrite", "maths", "extraction"}
    assert len(prompts) == 80
    assert min(counts.values()) >= 13
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 80


def test_those_about_a_text_bring_a_hundred_to_three_hundred_words() -> None:
    for prompt in read_prompts(BUILTIN):
        if prompt.category in ("summarise", "rewrite", "extraction"):
            task, _, text = prompt.text.partition("\n\n")
            assert len(task.split()) < 40
            assert 100 <= len(text.split()) <= 300


def test_spec_bench_gives_first_turns(tmp_path: Path) -> None:
    entries = [
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"question_id": 82, "category": "math", "turns": ["Three?"], "reference": []},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    assert read_prompts(str(file)) == [Prompt("81", "writing", "One?"), Prompt("82", "math", "Three?")]


def test_sharegpt_gives_first_human_turns(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    conversations = [
        {"id": "a", "conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "One?"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
        {"id": "c", "conversations": []},
        {"id": "d", "conversations": [{"from": "human", "value": "Two?"}, {"from": "human", "value": "Three?"}]},
    ]
    file.write_text(json.dumps(conversations, indent=2))
    assert read_prompts(str(file)) == [Prompt("a", "sharegpt", "One?"), Prompt("d", "sharegpt", "Two?")]


GOOD = '{"question_id": 1, "category": "x", "turns": ["y"]}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + '{"question_id": 2,\n', "line 2: not JSON"),
        (GOOD + "\n[]\n", "line 3: not a JSON object"),
        (GOOD + '{"category": "x", "turns": []}', 'line 2: "turns" must be'),
        ('{"category": "x", "turns": [{"role": "user"}]}', 'line 1: "turns" must be'),
        ('{"turns": ["y"]}', 'line 1: "category" must be'),
        ('[\n{"conversations": []},\n}\n]', "line 3: not JSON"),
        ('[{"conversations": []}, {"text": "y"}]', 'conversation 2: "conversations" must be'),
        ('[{"conversations": []}]', "has no prompts"),
        ("", "has no prompts"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_prompts(str(file))
    assert str(file) in str(raised.value)
    assert said in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give builtin"):
        read_prompts(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 2"):
        read_prompts(str(tmp_path / "bytes"))


def test_the_first_few_are_of_every_category() -> None:
    prompts = [
        Prompt(f"{name}{i}", name, "text") for name, count in (("a", 3), ("b", 1), ("c", 2)) for i in range(count)
    ]
    assert [p.id for p in in_turn(prompts, ())] == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert [p.id for p in in_turn(prompts, ["c", "a"])] == ["a0", "c0", "a1", "c1", "a2"]
    with pytest.raises(ConfigError, match="no prompt is of category 'd'; there are a, b, c"):
        in_turn(prompts, ["a", "d"])
