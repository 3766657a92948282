"""How well each contender's weights, in its own arithmetic, predict fixed texts: speed that was bought with precision
shows here.

    prose     a text of our own, as it stands
    answers   what an assistant says to a user, through the chat template; the questions are read and not counted
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import Worker

from graphspec.runtime.chat import render_chat
from graphspec.runtime.text import Tokenizer

TEXTS = Path(__file__).parent / "texts"


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids; those from `start` on count."""

    kind: str
    ids: tuple[int, ...]
    start: int


def texts(tokenizer: Tokenizer) -> list[Text]:
    """The fixed ones, as token ids."""
    prose = tokenizer.encode((TEXTS / "prose.txt").read_text(encoding="utf-8"), add_special_tokens=True)
    found = [Text("prose", tuple(prose), 1)]
    for line in (TEXTS / "answers.jsonl").read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        question = tokenizer.encode(chat(tokenizer, said["question"]), add_special_tokens=False)
        answer = tokenizer.encode(said["answer"] + tokenizer.eos_token, add_special_tokens=False)
        found.append(Text("answers", (*question, *answer), len(question)))
    return found


def chat(tokenizer: Tokenizer, message: str) -> str:
    """A user's message as the model reads it; without a chat template, as it is."""
    if tokenizer.chat_template is None:
        return message
    return render_chat(
        tokenizer.chat_template,
        [{"role": "user", "content": message}],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def perplexities(worker: Worker, of: Sequence[Text]) -> Mapping[str, float]:
    """By kind of text. Raises ContenderError."""
    logprobs: dict[str, list[float]] = {}
    for text in of:
        answer = worker.ask({"score": {"ids": list(text.ids)}})["logprobs"]
        assert len(answer) == len(text.ids) - 1
        logprobs.setdefault(text.kind, []).extend(answer[text.start - 1 :])
    return {kind: math.exp(-sum(values) / len(values)) for kind, values in logprobs.items()}
