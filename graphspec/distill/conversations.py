"""Conversations on disk: one JSON object a line, appended as each one ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from graphspec.errors import ConfigError

FILES = "conversations*.jsonl"
_HELD_OUT_BUCKETS = 1000
_FEWEST_DISTINCT = 0.2
_WINDOW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One prompt as the target reads it, and the target's own answer."""

    index: int
    """Its number in the data set: with the seed, it decides everything else."""
    seed: int
    """Of the answer's draws; of no matter at temperature 0."""
    temperature: float
    category: str
    prompt: tuple[int, ...]
    """Token ids of the rendered chat, the answer's header included."""
    answer: tuple[int, ...]
    """Token ids, an ending EOS included."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer


class ConversationFile:
    """Appends conversations; every line is on disk before the next is begun."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, conversation: Conversation) -> None:
        """Writes and flushes one line."""
        self._file.write(json.dumps(asdict(conversation), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


class ConversationReader:
    """Reads what a folder's files have got since it last did; each index once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[Path, tuple[int, int]] = {}
        """Bytes and lines read of a file: whole lines, so a half-written one that is cut off moves nothing."""
        self._seen: set[int] = set()

    def read(self) -> list[Conversation]:
        """In the order of their files. Raises ConfigError naming file and line."""
        found = []
        for path in sorted(self._folder.glob(FILES)):
            for conversation in self._appended(path):
                if conversation.index not in self._seen:
                    self._seen.add(conversation.index)
                    found.append(conversation)
        return found

    def _appended(self, path: Path) -> Iterator[Conversation]:
        size, lines = self._places.get(path, (0, 0))
        with path.open("rb") as file:
            file.seek(size)
            for number, line in enumerate(file, start=lines + 1):
                if not line.endswith(b"\n"):
                    return  # being written, or cut off by a kill: made again when the run goes on
                yield _parsed(path, number, line)
                size += len(line)
                self._places[path] = (size, number)


def read_conversations(folder: Path) -> list[Conversation]:
    """Every conversation of a folder by index, each index once. Raises ConfigError naming file and line."""
    return sorted(ConversationReader(folder).read(), key=lambda conversation: conversation.index)


def usable(conversations: Iterable[Conversation], *, shortest_answer: int = 8) -> list[Conversation]:
    """Those worth training on: each prompt once, answers of some length that do not only repeat themselves."""
    seen: set[tuple[int, ...]] = set()
    kept = []
    for conversation in conversations:
        if conversation.prompt in seen or len(conversation.answer) < shortest_answer:
            continue
        seen.add(conversation.prompt)
        if distinct_share(conversation.answer) >= _FEWEST_DISTINCT:
            kept.append(conversation)
    return kept


def split(
    conversations: Iterable[Conversation], held_out_share: float
) -> tuple[list[Conversation], list[Conversation]]:
    """For training, and held out: decided by a hash of the prompt, so a prompt never changes sides."""
    training: list[Conversation] = []
    held_out: list[Conversation] = []
    for conversation in conversations:
        bucket = _bucket(conversation.prompt)
        (held_out if bucket < held_out_share * _HELD_OUT_BUCKETS else training).append(conversation)
    return training, held_out


def distinct_share(tokens: Sequence[int]) -> float:
    """Distinct runs of four tokens among all of them; 1 for a text too short to have two."""
    runs = [tuple(tokens[start : start + _WINDOW]) for start in range(len(tokens) - _WINDOW + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def _bucket(prompt: Sequence[int]) -> int:
    digest = hashlib.sha256(json.dumps(list(prompt)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_BUCKETS


def _parsed(path: Path, number: int, line: bytes) -> Conversation:
    try:
        values = json.loads(line)
        prompt, answer = (tuple(int(token) for token in values.pop(name)) for name in ("prompt", "answer"))
        return Conversation(prompt=prompt, answer=answer, **values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}, line {number}, is no conversation ({error}); delete the line") from None


def _drop_unfinished_line(path: Path) -> None:
    """What a kill left half written; the next line would be glued to it."""
    if not path.exists():
        return
    content = path.read_bytes()
    if whole := content.rfind(b"\n") + 1 - len(content):
        with path.open("r+b") as file:
            file.truncate(len(content) + whole)
