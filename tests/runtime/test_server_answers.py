"""What OpenAI's own client gets from a server is what `generate` answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from pairs import MAX_LENGTH, NAMES, Pairs
from served import CHAT, Served, model, serve

from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams

EAGLE3 = NAMES[1]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}


@pytest.fixture(scope="module")
def served(pairs: Pairs) -> Iterator[Served]:
    bundle = pairs.bundle(EAGLE3)
    with serve(lambda metrics: model(bundle, metrics)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def offline(pairs: Pairs) -> LoadedBundle:
    return pairs.loaded(EAGLE3)


def whole(offline: LoadedBundle, prompt: str, count: int = 20, **changes: Any) -> str:
    params = SamplingParams(**{"max_new_tokens": count, "temperature": 0.9, "top_p": 0.95, "seed": 7, **changes})
    (answer,) = offline.generate(prompt, params)
    return answer.text


def rejected(answer: Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.usage.completion_tokens_details.rejected_prediction_tokens or 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_a_completion_is_what_generate_answers_streamed_or_not(
    client: OpenAI, offline: LoadedBundle, sampling: dict[str, Any]
) -> None:
    expected = whole(offline, "abc", **{"seed": None, **sampling})
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 20, **sampling}
    assert client.completions.create(**asked).choices[0].text == expected
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_a_chat_goes_through_the_template(client: OpenAI, offline: LoadedBundle) -> None:
    messages: Any = [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "cd"}]}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, **SAMPLED}
    expected = whole(offline, "ab:cd:")
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_cache(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "abc"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, seed=1)
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_LENGTH
    assert answer.choices[0].finish_reason == "length"


def test_prompts_may_be_texts_or_token_ids_one_or_many(client: OpenAI, offline: LoadedBundle) -> None:
    texts = ["abc", "xyz", "a"]
    expected = [whole(offline, text, 8) for text in texts]
    ids = [offline.encode(text) for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, **SAMPLED)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
    answer = client.completions.create(model="tiny", prompt=ids[1], max_tokens=8, **SAMPLED)
    assert [choice.text for choice in answer.choices] == expected[1:2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_choices_have_the_seeds_that_follow(client: OpenAI, offline: LoadedBundle) -> None:
    expected = [whole(offline, text, 8, seed=seed) for text in ("abc", "xyz") for seed in (7, 8, 9)]
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["abc", "xyz"], "max_tokens": 8, "n": 3, **SAMPLED}
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 48)
    streamed = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    by_choice = groupby(sorted(streamed, key=lambda choice: choice.index), key=lambda choice: choice.index)
    assert ["".join(choice.text for choice in choices) for _, choices in by_choice] == expected


def test_an_echo_begins_with_the_prompt(client: OpenAI, offline: LoadedBundle) -> None:
    expected = "abc" + whole(offline, "abc", 8)
    for prompt in ("abc", offline.encode("abc")):
        asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "echo": True, **SAMPLED}
        assert client.completions.create(**asked).choices[0].text == expected
        chunks = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_the_number_of_tokens_is_16_unless_it_is_said_and_may_be_none(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc"}
    answers = {count: client.completions.create(**asked, max_tokens=count) for count in (0, 1)}
    answers[16] = client.completions.create(**asked)
    used = {count: answer.usage and answer.usage.completion_tokens for count, answer in answers.items()}
    assert used == {0: 0, 1: 1, 16: 16}
    assert answers[0].choices[0].text == ""


def test_a_full_prompt_has_room_for_one_token(client: OpenAI) -> None:
    prompt = [5] * (MAX_LENGTH - 1)
    answer = client.completions.create(model="tiny", prompt=prompt)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_answers_end_where_stop_strings_and_tokens_say(client: OpenAI, offline: LoadedBundle) -> None:
    text = whole(offline, "abc", 30)
    stop = text[6:8]
    for given in (stop, [stop, "nothing like it"]):
        answer = client.completions.create(model="tiny", prompt="abc", max_tokens=30, stop=given, **SAMPLED)
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    kept = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, stop=stop, **SAMPLED, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == text[: text.index(stop) + 2]
    (token,) = offline.encode(text[4])
    cut = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, **SAMPLED, extra_body={"stop_token_ids": [token]}
    )
    assert cut.choices[0].text == text[: text.index(text[4])]


def test_without_speculation_the_text_is_the_same_and_nothing_is_drafted(client: OpenAI, offline: LoadedBundle) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 20, **SAMPLED}
    with_drafts = client.completions.create(**asked)
    without = client.completions.create(**asked, extra_body={"speculative": False})
    assert with_drafts.choices[0].text == without.choices[0].text == whole(offline, "abc")
    assert rejected(with_drafts) > 0
    assert rejected(without) == 0


def test_speculation_is_told_as_aiperf_reads_it(served: Served, offline: LoadedBundle) -> None:
    body = {"prompt": ["abc", "xyz"], "max_tokens": 40, "temperature": 0}
    told = served.post("/v1/completions", body).json
    counts = told["metrics"]["speculative_decoding"]
    answers = offline.generate(["abc", "xyz"], SamplingParams(max_new_tokens=40))
    histogram = counts["acceptance_histogram"]
    assert sum(histogram) == counts["num_spec_steps"] == sum(one.acceptance.verifications for one in answers)
    accepted = sum(one.acceptance.accepted for one in answers)
    assert sum(length * count for length, count in enumerate(histogram)) == accepted > 0
    assert counts["num_accepted_draft_tokens"] == accepted
    assert counts["num_draft_tokens"] == sum(one.acceptance.drafted for one in answers)
    details = told["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == counts["num_draft_tokens"] - accepted


def test_token_ids_are_given_when_asked_for(served: Served, offline: LoadedBundle) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "return_token_ids": True, **SAMPLED}
    (choice,) = served.post("/v1/completions", body).json["choices"]
    (answer,) = offline.generate("abc", SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.95, seed=7))
    assert choice["token_ids"] == list(answer.token_ids)
    assert choice["prompt_token_ids"] == offline.encode("abc")
    events = served.post("/v1/completions", {**body, "stream": True}).events
    streamed = [choice for event in events[:-1] for choice in event["choices"]]
    assert [token for choice in streamed for token in choice.get("token_ids", [])] == list(answer.token_ids)
    assert [choice["prompt_token_ids"] for choice in streamed if "prompt_token_ids" in choice] == [
        offline.encode("abc")
    ]


def test_the_models_endpoints_name_the_model_and_its_length(client: OpenAI, served: Served) -> None:
    (listed,) = client.models.list().data
    assert listed.id == client.models.retrieve("tiny").id == "tiny"
    (card,) = served.get("/v1/models").json["data"]
    assert card["max_model_len"] == MAX_LENGTH
    assert served.get("/v1/models/other").status == 404


def test_the_tokenizer_is_served(served: Served, offline: LoadedBundle) -> None:
    ids = offline.encode("abc")
    told = served.post("/tokenize", {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True}).json
    assert told == {"count": 3, "max_model_len": MAX_LENGTH, "tokens": ids, "token_strs": ["a", "b", "c"]}
    chat = served.post("/tokenize", {"messages": [{"role": "user", "content": "abc"}]}).json
    assert chat["tokens"] == offline.encode("abc:")
    assert served.post("/detokenize", {"tokens": ids}).json == {"prompt": "abc"}
    info = served.get("/tokenizer_info").json
    assert "eos_token" in info
    assert info["chat_template"] == CHAT


def test_a_prompt_that_was_read_before_is_told_as_cached(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": list(range(60, 90)), "max_tokens": 5, "temperature": 0.0}
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 28
