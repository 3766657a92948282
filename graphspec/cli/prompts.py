"""What `graphspec generate` is asked, from the command line, files and stdin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphspec.errors import RequestError

from .errors import UsageError

if TYPE_CHECKING:
    from graphspec.runtime.generate import LoadedBundle

_STDIN = "-"


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """Every prompt, those given as text first. Raises RequestError; OSError for a file that cannot be read."""
    if [*texts, *files].count(_STDIN) > 1:
        raise UsageError("stdin (-) can be one prompt only")
    if not texts and not files:
        raise UsageError("no prompt: give --prompt TEXT, or --prompt-file F (- reads stdin)")
    return [*(_stdin() if text == _STDIN else text for text in texts), *(_file(name) for name in files)]


def prompt_ids(bundle: LoadedBundle, text: str, *, chat: bool | None, system: str | None) -> list[int]:
    """Token ids of one prompt; through the chat template if `chat`, or if it is None and there is one."""
    in_chat = bundle.tokenizer.chat_template is not None if chat is None else chat
    if not in_chat:
        if system is not None:
            raise RequestError("--system is for a chat, and this prompt is raw: write it into the prompt")
        return bundle.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    # The template writes special tokens itself.
    return bundle.encode(bundle.chat([*messages, {"role": "user", "content": text}]), add_special_tokens=False)


def _file(name: str) -> str:
    return _stdin() if name == _STDIN else _text(Path(name).read_bytes(), name)


def _stdin() -> str:
    return _text(sys.stdin.buffer.read(), "stdin")


def _text(content: bytes, name: str) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: byte {error.start} cannot be read") from None
    # Editors and echo end a file with a line break that nobody meant.
    return text.removesuffix("\n").removesuffix("\r")
