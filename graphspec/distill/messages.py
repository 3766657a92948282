"""Users' messages from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphspec.errors import ConfigError


def read_messages(path: Path) -> tuple[str, ...]:
    """One message a line: a JSON object with `prompt` (a text), or `messages` as chats have them, of which the
    first of the user counts. Raises ConfigError naming the line."""
    try:
        # At line feeds only: JSON may hold other line ends, such as U+2028, in its texts as they are.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path} cannot be read: {error}") from error
    found = tuple(_message(path, number, line) for number, line in enumerate(lines, start=1) if line.strip())
    if not found:
        raise ConfigError(f"--data {path} holds no messages; give one JSON object a line")
    return found


def _message(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--data {path}, line {number}, is not JSON ({error})") from None
    message = _text(entry) if isinstance(entry, dict) else None
    if not isinstance(message, str) or not message.strip():
        raise ConfigError(f'--data {path}, line {number}, has no message: give "prompt" or "messages" with text')
    if any("\ud800" <= character <= "\udfff" for character in message):
        raise ConfigError(f"--data {path}, line {number}, holds half a character (a lone surrogate), which is no text")
    return message


def _text(entry: dict[str, Any]) -> Any:
    if "prompt" in entry:
        return entry["prompt"]
    chat = entry.get("messages")
    if not isinstance(chat, list):
        return None
    return next((m.get("content") for m in chat if isinstance(m, dict) and m.get("role") == "user"), None)
