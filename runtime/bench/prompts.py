"""What a benchmark asks: our own prompts, Spec-Bench's question.jsonl, or ShareGPT's conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from graphspec.errors import ConfigError

BUILTIN = "builtin"
_HUMAN = ("human", "user")
_SHAREGPT = "sharegpt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user's message."""

    id: str
    category: str
    text: str


def read_prompts(dataset: str) -> list[Prompt]:
    """Every prompt of a data set: `builtin`, or a file of either format (a ShareGPT file is one JSON list). Raises
    ConfigError naming the file and the line."""
    if dataset == BUILTIN:
        return list(_spec_bench(BUILTIN, files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")))
    path = Path(dataset)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give builtin, a Spec-Bench .jsonl or a ShareGPT .json") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    found = list(_sharegpt(dataset, text) if text.lstrip().startswith("[") else _spec_bench(dataset, text))
    if not found:
        raise ConfigError(f"{path} has no prompts")
    return found


def in_turn(prompts: Sequence[Prompt], categories: Sequence[str]) -> list[Prompt]:
    """Those of the categories (none given: of all), one of each after the other, so that the first few are of all.
    Raises ConfigError for a category that is not there."""
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := [name for name in categories if name not in known]:
        raise ConfigError(f"no prompt is of category {unknown[0]!r}; there are {', '.join(known)}")
    by_category = [[p for p in prompts if p.category == name] for name in known if not categories or name in categories]
    return [prompt for prompt in chain.from_iterable(zip_longest(*by_category)) if prompt is not None]


def _spec_bench(name: str, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _question(f"{name}, line {number}", _parsed(line, name, first_line=number))


def _question(where: str, entry: Any) -> Prompt:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: not a JSON object with question_id, category and turns")
    turns, category = entry.get("turns"), entry.get("category")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ConfigError(f'{where}: "turns" must be a list that begins with the text of a prompt')
    if not isinstance(category, str) or not category:
        raise ConfigError(f'{where}: "category" must be a name')
    return Prompt(str(entry.get("question_id", where)), category, turns[0])


def _sharegpt(name: str, text: str) -> Iterator[Prompt]:
    """The first human turn of each conversation; the data set has conversations without one."""
    for number, entry in enumerate(_parsed(text, name), start=1):
        where = f"{name}, conversation {number}"
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ConfigError(f'{where}: "conversations" must be a list of turns')
        said = next((turn.get("value") for turn in turns if turn.get("from") in _HUMAN), None)
        if isinstance(said, str) and said.strip():
            yield Prompt(str(entry.get("id", number)), _SHAREGPT, said)


def _parsed(text: str, name: str, *, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ConfigError(f"{name}, line {line}: not JSON ({error.msg} at column {error.colno})") from None
