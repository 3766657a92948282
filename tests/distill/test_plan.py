"""Conversations of one work directory are those of one plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from graphspec.distill.plan import check_plan
from graphspec.distill.synthesis import Synthesis
from graphspec.errors import ConfigError

PLAN = Synthesis(count=10, messages=("Hello", "Bye"))


def check(
    folder: Path, plan: Synthesis = PLAN, *, model: str = "models/m", target: str = "abc", max_length: int = 64
) -> None:
    check_plan(folder, plan, model=model, target=target, max_length=max_length)


@pytest.fixture(autouse=True)
def _has_conversations(tmp_path: Path) -> None:
    (tmp_path / "conversations-0-of-1.jsonl").touch()


def test_a_plan_without_conversations_may_change(tmp_path: Path) -> None:
    """What followed it was refused, and is asked again."""
    check(tmp_path / "new", max_length=10**9)
    check(tmp_path / "new", max_length=64)


def test_the_same_plan_and_more_of_it_go_on(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, replace(PLAN, count=99), model="elsewhere/m")


def test_another_plan_is_refused_by_what_differs(tmp_path: Path) -> None:
    check(tmp_path)
    with pytest.raises(ConfigError, match=r"plan\.json: messages, seed\)"):
        check(tmp_path, replace(PLAN, seed=1, messages=("Hello",)))
    with pytest.raises(ConfigError, match=r"plan\.json: target\)"):  # of the same name
        check(tmp_path, target="other weights")
    with pytest.raises(ConfigError, match=r"plan\.json: max_length\)"):  # answers were cut off elsewhere
        check(tmp_path, max_length=32)


def test_a_plan_of_an_earlier_version_says_less(tmp_path: Path) -> None:
    check(tmp_path)
    path = tmp_path / "plan.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: values[name] for name in values.keys() - {"target", "max_length"}}))
    check(tmp_path, max_length=32)


@pytest.mark.parametrize("text", ["", '{"seed', "[]", "\xff"])
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
        check(tmp_path)
