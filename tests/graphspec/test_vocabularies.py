"""A draft that proposes ids must mean by each what the target means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from graphspec.building import resolve_pair
from graphspec.checkpoints import Checkpoint, open_checkpoint
from graphspec.errors import CheckpointError, ResolutionError
from graphspec.vocabularies import vocabulary_misfits

WORDS = {"<s>": 0, "a": 1, "b": 2, "c": 3}
SPECIAL = {"id": 0, "content": "<s>", "special": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    return tiny.save_llama(root / "target", layers=1), tiny.save_llama(root / "draft", layers=1, seed=2)


def with_tokenizer(path: Path, tokenizer: object) -> Checkpoint:
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return open_checkpoint(path)


def tokenizer(vocabulary: Any, *added: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": list(added)}


def misfits(saved: tuple[Path, Path], ours: object, theirs: object) -> list[str]:
    target, draft = saved
    return vocabulary_misfits(with_tokenizer(target, ours), with_tokenizer(draft, theirs))


def test_another_text_for_an_id_is_told(saved: tuple[Path, Path]) -> None:
    (said,) = misfits(saved, tokenizer(WORDS), tokenizer({**WORDS, "b": 3, "c": 2}))
    assert said.startswith("its tokenizer gives 2 of 4 token ids another text, for example 2: 'c' for 'b'")


@pytest.mark.parametrize(
    "theirs",
    [
        tokenizer(WORDS),
        tokenizer({"a": 1, "b": 2}),
        tokenizer({**WORDS, "d": 4}),
        tokenizer(WORDS, {"id": 9, "content": "<new>", "special": False}),
        tokenizer([["<s>", 0.0], ["a", -1.0], ["b", -2.0], ["c", -3.0]]),
        tokenizer({"<begin>": 0, "a": 1}, {"id": 0, "content": "<begin>", "special": True}),
        {"model": {"type": "BPE", "vocab": {}}},
    ],
)
def test_what_both_name_alike_fits(saved: tuple[Path, Path], theirs: object) -> None:
    assert misfits(saved, tokenizer(WORDS, SPECIAL), theirs) == []


def test_added_tokens_count_where_they_are_not_special(saved: tuple[Path, Path]) -> None:
    ours, theirs = ({"id": 4, "content": text, "special": False} for text in ("<tool>", "<think>"))
    assert "4: '<think>' for '<tool>'" in misfits(saved, tokenizer(WORDS, ours), tokenizer(WORDS, theirs))[0]


@pytest.mark.parametrize("broken", [[], {}, {"model": 3}, {"model": {"vocab": [1]}}, {"model": {"vocab": {"a": "x"}}}])
def test_a_damaged_tokenizer_is_told(saved: tuple[Path, Path], broken: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json of '.*draft' is damaged"):
        misfits(saved, tokenizer(WORDS), broken)


def test_without_a_tokenizer_there_is_nothing_to_compare(saved: tuple[Path, Path]) -> None:
    target, draft = saved
    (draft / "tokenizer.json").unlink(missing_ok=True)
    assert vocabulary_misfits(with_tokenizer(target, tokenizer(WORDS)), open_checkpoint(draft)) == []


def test_a_pair_of_other_vocabularies_of_one_size_does_not_resolve(saved: tuple[Path, Path]) -> None:
    target, draft = saved
    tiny.save_tokenizer(target)
    tiny.save_tokenizer(draft)
    assert resolve_pair(target, draft).architecture.name == "UnifiedStandaloneLlama3ForCausalLM"
    parsed = json.loads((draft / "tokenizer.json").read_text())
    names = list(parsed["model"]["vocab"])
    parsed["model"]["vocab"] = {name: len(names) - 1 - index for index, name in enumerate(names)}
    (draft / "tokenizer.json").write_text(json.dumps(parsed))
    with pytest.raises(
        ResolutionError, match=r"does not belong to target .*: its tokenizer gives 128 of 128 token ids"
    ):
        resolve_pair(target, draft)
