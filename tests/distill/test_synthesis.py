"""The target's own conversations: the same for a seed, however they are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from graphspec.distill.conversations import Conversation, read_conversations
from graphspec.distill.openings import OPENINGS
from graphspec.distill.synthesis import (
    Question,
    Synthesis,
    _conversations,
    _opened,
    _questions,
    is_askable,
    prompt_ids,
    synthesise,
    user_header,
)
from graphspec.errors import UnsupportedError
from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.answer import Generation
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.runtime.sampling import SamplingParams

PLAN = Synthesis(count=12, seed=5, most_user_tokens=24, most_answer_tokens=20)


@pytest.fixture(scope="module")
def made(chatty_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Conversation]:
    folder = tmp_path_factory.mktemp("made")
    synthesise(chatty_bundle, folder, PLAN, rows=4)
    return read_conversations(folder)


@pytest.fixture(scope="module")
def loaded(chatty_bundle: Path) -> LoadedBundle:
    return load(chatty_bundle, num_threads=1)


def test_every_index_is_answered_or_known_as_refused(made: Sequence[Conversation]) -> None:
    assert [conversation.index for conversation in made] == list(range(PLAN.count))
    answered = [conversation for conversation in made if conversation.answer]
    assert len(answered) >= 6
    assert {c.category for c in answered} <= {*OPENINGS}
    assert all(c.category == "refused" and not c.prompt for c in made if not c.answer)


def test_an_answer_is_what_the_target_says_to_the_prompt(made: Sequence[Conversation], loaded: LoadedBundle) -> None:
    for conversation in made:
        if conversation.answer:
            params = SamplingParams(
                temperature=conversation.temperature, seed=conversation.seed, max_new_tokens=PLAN.most_answer_tokens
            )
            (generation,) = loaded.generate([conversation.prompt], params, width=0)
            assert generation.token_ids == conversation.answer


def test_a_message_begins_as_its_category_opens(made: Sequence[Conversation], loaded: LoadedBundle) -> None:
    for conversation in made:
        if conversation.category in OPENINGS:
            text = loaded.tokenizer.decode(conversation.prompt)
            said = text.partition("<user>")[2].removesuffix("<assistant>")
            openings = (opening.partition("{topic}")[0] for opening in OPENINGS[conversation.category])
            # The tiny tokenizer has no blank and no line break: it reads them as "!".
            assert any(said.startswith(o.strip().replace(" ", "!").replace("\n", "!")) for o in openings)


def test_rows_workers_and_a_stop_in_the_middle_do_not_change_the_data(
    chatty_bundle: Path, made: Sequence[Conversation], tmp_path: Path
) -> None:
    class StopError(Exception):
        pass

    seen: list[Conversation] = []

    def stop(conversation: Conversation) -> None:
        seen.append(conversation)
        if len(seen) == 2:
            raise StopError

    with pytest.raises(StopError):
        synthesise(chatty_bundle, tmp_path, PLAN, rows=2, worker=0, workers=2, on_conversation=stop)
    assert len(read_conversations(tmp_path)) == 2
    for worker in (1, 0):
        synthesise(chatty_bundle, tmp_path, PLAN, rows=3, worker=worker, workers=2)
    assert read_conversations(tmp_path) == made


def test_another_seed_makes_other_conversations(
    chatty_bundle: Path, made: Sequence[Conversation], tmp_path: Path
) -> None:
    synthesise(chatty_bundle, tmp_path, Synthesis(count=4, seed=6, most_user_tokens=24, most_answer_tokens=20), rows=4)
    others = {c.prompt for c in read_conversations(tmp_path) if c.answer}
    assert others
    assert not others & {c.prompt for c in made}


def test_given_messages_are_asked_as_they_are(chatty_bundle: Path, loaded: LoadedBundle, tmp_path: Path) -> None:
    plan = Synthesis(count=9, messages=("Hello", "Bye"), most_answer_tokens=5, sampled_share=0.0)
    synthesise(chatty_bundle, tmp_path, plan, rows=2)
    conversations = read_conversations(tmp_path)
    texts = [loaded.tokenizer.decode(conversation.prompt) for conversation in conversations]
    assert texts == ["<user>Hello<assistant>", "<user>Bye<assistant>"]
    assert {c.temperature for c in conversations} == {0.0}


def test_a_model_without_a_chat_goes_on_from_the_messages(chatty_bundle: Path, loaded: LoadedBundle) -> None:
    with load(chatty_bundle, num_threads=1) as base:
        base.tokenizer.chat_template = None
        question = Question(index=0, category="data", system=None, message="Hello")
        assert prompt_ids(base, question) == tuple(loaded.encode("Hello"))


def test_the_header_ends_where_the_user_begins(loaded: LoadedBundle) -> None:
    assert user_header(loaded, None) == "<user>"
    assert user_header(loaded, "S") == "<system>S<user>"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content | length }}"])
def test_a_target_without_a_header_for_users_cannot_make_up_conversations(
    chatty_bundle: Path, template: str | None
) -> None:
    with load(chatty_bundle, num_threads=1) as other:
        other.tokenizer.chat_template = template
        with pytest.raises(UnsupportedError, match="give --data instead"):
            user_header(other, None)


def test_a_template_that_refuses_system_messages_gets_none(chatty_bundle: Path) -> None:
    with load(chatty_bundle, num_threads=1) as other:
        template = other.tokenizer.chat_template
        other.tokenizer.chat_template = (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            + str(template)
        )
        indices = [index for index in range(60) if _opened(5, index).system]
        assert len(indices) > 4
        asked = _questions(other, PLAN, indices)
        assert asked
        assert {question.system for question in asked} == {None}


def test_a_message_that_says_nothing_is_not_asked(chatty_bundle: Path) -> None:
    with load(chatty_bundle, num_threads=1) as other:
        other.tokenizer.chat_template = "{{ messages[-1].content | replace('nothing', '') }}"
        plan = Synthesis(count=2, messages=("nothing", "Hello"), most_answer_tokens=5)
        made = list(_conversations(other, plan, [0, 1]))
    assert [(c.index, c.category, bool(c.answer)) for c in made] == [(1, "data", True), (0, "refused", False)]


@pytest.mark.parametrize(
    ("message", "tokens", "reason", "fit"),
    [
        ("What is a fish?", (1, 2, 3, 4, 5), "stop", True),
        ("What is a fish?", (1, 2, 3, 4, 5), "length", False),
        ("Fish?", (1, 2, 3, 4, 5), "stop", False),
        ("123 + 456 + 789", (1, 2, 3, 4, 5), "stop", False),
        ("What is a f\ufffdsh?", (1, 2, 3, 4, 5), "stop", False),
        ("What is what is what", (1, 2) * 9, "stop", False),
    ],
)
def test_only_whole_messages_with_words_are_asked(
    message: str, tokens: tuple[int, ...], reason: str, fit: bool
) -> None:
    generation = Generation(
        text="",
        token_ids=tokens,
        finish_reason="stop" if reason == "stop" else "length",
        num_prompt_tokens=1,
        seed=0,
        acceptance=AcceptanceStatistics(),
    )
    assert is_askable(message, generation) is fit
