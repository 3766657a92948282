"""Conversations from the target itself, through our own engine.

    --self-synthesize: user header + first words ─▶ the user's message, drawn ─▶ filter ─┐
    --data:                              messages of a file ─────────────────────────────┴▶ the target's answer

Everything about conversation i follows from (seed, i): a row's tokens do not depend on its neighbours, so neither
the number of rows nor of workers, nor where a run was stopped, changes the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from graphspec.errors import RequestError, UnsupportedError
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams

from .conversations import Conversation, ConversationFile, distinct_share, read_conversations
from .openings import draw_opening

if TYPE_CHECKING:
    from graphspec.runtime.answer import Generation
    from graphspec.runtime.generate import LoadedBundle

OnConversation = Callable[[Conversation], None]
_ROUNDS = 12
"""Conversations in work at once, in times the number of rows: the end of a chunk leaves rows idle."""
_PLACEHOLDER = "\u241fgraphspec\u241f"
"""Stands for the user's words while the template's own are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """How conversations are made."""

    count: int
    """With `messages`: at most as many as there are."""
    seed: int = 0
    messages: tuple[str, ...] = ()
    """The users' messages; none: the target makes them up."""
    most_user_tokens: int = 96
    most_answer_tokens: int = 256
    user_temperature: float = 1.0
    user_top_p: float = 0.9
    sampled_share: float = 0.2
    """Share of answers drawn at `answer_temperature`; the others are greedy."""
    answer_temperature: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a conversation asks."""

    index: int
    category: str
    system: str | None
    message: str
    """The user's, or its first words."""


def synthesise(
    bundle: Path,
    folder: Path,
    plan: Synthesis,
    *,
    rows: int,
    worker: int = 0,
    workers: int = 1,
    on_conversation: OnConversation = lambda _: None,
) -> None:
    """Appends the conversations that `folder` lacks, of every `workers`-th index from `worker` on.

    `rows` is how many the engine answers at once. One thread: several workers share a machine better than the
    threads of one. A made-up question that is not fit to be asked leaves a conversation without tokens, so that it
    is not made up again.
    """
    done = {conversation.index for conversation in read_conversations(folder)}
    total = min(plan.count, len(plan.messages)) if plan.messages else plan.count
    missing = [index for index in range(worker, total, workers) if index not in done]
    if not missing:
        return
    name = f"conversations-{worker}-of-{workers}.jsonl"
    with load(bundle, max_batch_size=rows, num_threads=1) as loaded, closing(ConversationFile(folder / name)) as file:
        size = rows * _ROUNDS
        for start in range(0, len(missing), size):
            for conversation in _conversations(loaded, plan, missing[start : start + size]):
                file.append(conversation)
                on_conversation(conversation)


def _conversations(loaded: LoadedBundle, plan: Synthesis, indices: Sequence[int]) -> Iterator[Conversation]:
    refused = set(indices)
    for conversation in _answered(loaded, _questions(loaded, plan, indices), plan):
        refused.discard(conversation.index)
        yield conversation
    for index in sorted(refused):
        yield Conversation(index=index, seed=plan.seed, temperature=0.0, category="refused", prompt=(), answer=())


def _questions(loaded: LoadedBundle, plan: Synthesis, indices: Sequence[int]) -> list[Question]:
    if plan.messages:
        return [Question(index=i, category="data", system=None, message=plan.messages[i]) for i in indices]
    begun = [_opened(plan.seed, index) for index in indices]
    if not _takes_system(loaded):
        begun = [replace(question, system=None) for question in begun]
    fitting = _fitting(loaded, [(q, _ids(loaded, user_header(loaded, q.system) + q.message)) for q in begun])
    params = [
        SamplingParams(
            temperature=plan.user_temperature,
            top_p=plan.user_top_p,
            seed=derived_seed(plan.seed, question.index, "user"),
            max_new_tokens=plan.most_user_tokens,
        )
        for question, _ in fitting
    ]
    written = loaded.generate([prompt for _, prompt in fitting], params, width=0)
    return [
        replace(question, message=(question.message + generation.text).strip())
        for (question, _), generation in zip(fitting, written, strict=True)
        if is_askable(question.message + generation.text, generation)
    ]


def _opened(seed: int, index: int) -> Question:
    category, opening, system = draw_opening(Random(f"{seed}:{index}"))
    return Question(index=index, category=category, system=system, message=opening)


def is_askable(message: str, written: Generation) -> bool:
    """Whether a made-up message is one that a user could send: ended, of some length, text, and no loop."""
    text = message.strip()
    return (
        written.finish_reason == "stop"
        and len(text) >= 12
        and any(character.isalpha() for character in text)
        and "\ufffd" not in text
        and distinct_share(written.token_ids) >= 0.5
    )


def _answered(loaded: LoadedBundle, questions: Sequence[Question], plan: Synthesis) -> Iterator[Conversation]:
    asked = _fitting(loaded, [(question, prompt_ids(loaded, question)) for question in questions])
    params = [_answer_params(plan, question.index) for question, _ in asked]
    for piece in loaded.stream([prompt for _, prompt in asked], params, width=0):
        if piece.generation is None:
            continue
        (question, prompt), drawn = asked[piece.index], params[piece.index]
        yield Conversation(
            index=question.index,
            seed=piece.generation.seed,
            temperature=drawn.temperature,
            category=question.category,
            prompt=prompt,
            answer=piece.generation.token_ids,
        )


def _fitting(
    loaded: LoadedBundle, asked: Sequence[tuple[Question, tuple[int, ...]]]
) -> list[tuple[Question, tuple[int, ...]]]:
    """Those whose prompt says something and leaves room for an answer."""
    return [(question, prompt) for question, prompt in asked if 0 < len(prompt) < loaded.manifest.max_length]


def _answer_params(plan: Synthesis, index: int) -> SamplingParams:
    sampled = Random(f"{plan.seed}:{index}:answer").random() < plan.sampled_share
    return SamplingParams(
        temperature=plan.answer_temperature if sampled else 0.0,
        seed=derived_seed(plan.seed, index, "answer"),
        max_new_tokens=plan.most_answer_tokens,
    )


def user_header(loaded: LoadedBundle, system: str | None) -> str:
    """The rendered chat up to the user's first word. Raises UnsupportedError for a template that hides it."""
    try:
        rendered = loaded.chat(_messages(system, _PLACEHOLDER))
    except RequestError as error:
        raise UnsupportedError(f"the target cannot make up conversations: {error}; give --data instead") from error
    header, found, _ = rendered.partition(_PLACEHOLDER)
    if not found:
        raise UnsupportedError("the target's chat template changes the user's text; give --data instead")
    return header


def _takes_system(loaded: LoadedBundle) -> bool:
    """Whether the template has a place for system messages; some refuse them."""
    try:
        loaded.chat(_messages("S", "U"))
    except RequestError:
        return False
    return True


def derived_seed(seed: int, index: int, part: str) -> int:
    """A 64-bit seed for one draw of one conversation."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}:{part}".encode()).digest()[:8], "big")


def prompt_ids(loaded: LoadedBundle, question: Question) -> tuple[int, ...]:
    """Through the chat template; a model that has none goes on from the message itself."""
    if loaded.tokenizer.chat_template is None:
        return tuple(loaded.encode(question.message))
    return _ids(loaded, loaded.chat(_messages(question.system, question.message)))


def _messages(system: str | None, message: str) -> list[dict[str, str]]:
    own = [] if system is None else [{"role": "system", "content": system}]
    return [*own, {"role": "user", "content": message}]


def _ids(loaded: LoadedBundle, text: str) -> tuple[int, ...]:
    return tuple(loaded.encode(text, add_special_tokens=False))
