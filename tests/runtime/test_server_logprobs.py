"""Log-probabilities over HTTP: the two forms, whole and streamed, and what lm-eval makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
from answers import PROMPTS
from openai import OpenAI
from pairs import MAX_LENGTH, NAMES, Pairs
from restaging import restage
from served import CHAT as TEMPLATE
from served import Served, model, serve

from graphspec.runtime.answer import Generation
from graphspec.runtime.generate import load
from graphspec.runtime.logprobs import TokenLogprob
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.scheduler import Scheduler
from graphspec.runtime.server.logprobs import ScoredToken, TokenNames, chat_logprobs, completion_logprobs, text_offsets
from graphspec.runtime.server.metrics import Metrics
from graphspec.runtime.server.model import Model
from graphspec.runtime.text import Tokenizer

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def served(pairs: Pairs) -> Iterator[Served]:
    """One that reads prompts in several chunks."""

    def loaded(_: Metrics) -> Model:
        bundle = load(pairs.bundle(NAMES[2]), num_threads=1)
        bundle.tokenizer.chat_template = TEMPLATE
        return Model(bundle=bundle, scheduler=Scheduler(bundle, prefill_chunk=5))

    with serve(loaded) as running:
        yield running


def ask(served: Served, path: str, **body: Any) -> Any:
    reply = served.post(path, body)
    assert reply.status == 200, reply.text
    return reply.json


def offline(pairs: Pairs, prompt: Any, **params: Any) -> Generation:
    """Without a server and without drafts."""
    return pairs.loaded(NAMES[2]).generate([prompt], SamplingParams(**params), width=0)[0]


def lm_eval_loglikelihood(served: Served, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """What lm-eval 0.4.13's local-completions asks for (context, continuation), and how it reads the answer
    (lm_eval/models/openai_completions.py)."""
    payload = {
        "model": "tiny",
        "prompt": [context + continuation for context, continuation in requests],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    found = []
    choices = sorted(ask(served, TEXT, **payload)["choices"], key=itemgetter("index"))
    for choice, (context, _) in zip(choices, requests, strict=True):
        own = choice["logprobs"]["token_logprobs"][len(context) : -1]
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(token == max(best.values()) for token, best in zip(own, top, strict=True))
        found.append((sum(own), is_greedy))
    return found


def test_lm_eval_finds_the_likelihood_of_each_continuation_and_which_is_greedy(served: Served, pairs: Pairs) -> None:
    requests, expected = [], []
    for prompt in PROMPTS:
        greedy = list(offline(pairs, prompt, max_new_tokens=6).token_ids)
        for continuation in (greedy, [*greedy[:3], (greedy[3] + 1) % 128, *greedy[4:]], greedy[:1]):
            requests.append((list(prompt), continuation))
            scores = offline(pairs, (*prompt, *continuation), max_new_tokens=1, prompt_logprobs=0).prompt_logprobs
            assert scores is not None
            own = [score.logprob for score in scores[len(prompt) :] if score is not None]
            assert len(own) == len(continuation)
            expected.append((sum(own), continuation == greedy[: len(continuation)]))
    assert lm_eval_loglikelihood(served, requests) == expected
    assert {is_greedy for _, is_greedy in expected} == {True, False}


def test_lm_eval_sends_prompts_of_all_but_one_of_the_length(served: Served) -> None:
    tokens = [i % 128 for i in range(MAX_LENGTH - 1)]
    ((likelihood, _),) = lm_eval_loglikelihood(served, [(tokens[:60], tokens[60:])])
    assert likelihood < 0


def test_lm_eval_reads_the_texts_of_a_batch(served: Served, pairs: Pairs) -> None:
    """parse_generations."""
    answer = ask(served, TEXT, prompt=[list(prompt) for prompt in PROMPTS], max_tokens=5, temperature=0, seed=1234)
    texts: list[Any] = [None] * len(answer["choices"])
    for choice in answer["choices"]:
        texts[choice["index"]] = choice["text"]
    assert texts == [offline(pairs, prompt, max_new_tokens=5).text for prompt in PROMPTS]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("speculative", [True, False])
def test_a_completion_lists_the_tokens_of_its_text(served: Served, pairs: Pairs, speculative: bool, count: int) -> None:
    asked = {"prompt": "abcdef", "max_tokens": 12, "temperature": 0.9, "seed": 3, "speculative": speculative}
    (choice,) = ask(served, TEXT, **asked, logprobs=count)["choices"]
    listed = choice["logprobs"]
    assert set(listed) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in listed.values()} == {12}
    alone = offline(pairs, "abcdef", max_new_tokens=12, temperature=0.9, seed=3, logprobs=count)
    assert alone.logprobs is not None
    assert listed["token_logprobs"] == [score.logprob for score in alone.logprobs]
    assert "".join(listed["tokens"]) == choice["text"]
    for token, own, top, offset in zip(*(listed[name] for name in ("tokens", *LISTS)), strict=True):
        assert top[token] == own
        assert len(top) in (count, count + 1)
        assert choice["text"][offset:].startswith(token)


LISTS = ("token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("prompt", ["abcdefg", [64, 65, 66, 67, 68, 69, 70], [5]])
@pytest.mark.parametrize("limit", [0, 1, 6])
def test_an_echo_lists_the_prompt_too(served: Served, pairs: Pairs, prompt: Any, limit: int) -> None:
    asked = {"prompt": prompt, "max_tokens": limit, "temperature": 0, "echo": True, "logprobs": 2}
    (choice,) = ask(served, TEXT, **asked)["choices"]
    listed = choice["logprobs"]
    length = len(prompt) + limit
    assert {len(values) for values in listed.values()} == {length}
    assert "".join(listed["tokens"]) == choice["text"]
    assert (listed["token_logprobs"][0], listed["top_logprobs"][0]) == (None, None)
    alone = offline(pairs, prompt, max_new_tokens=limit, logprobs=2, prompt_logprobs=2)
    assert alone.prompt_logprobs is not None
    assert alone.logprobs is not None
    scores = [*alone.prompt_logprobs[1:], *alone.logprobs]
    assert listed["token_logprobs"][1:] == [score.logprob for score in scores if score is not None]
    assert all(
        top[token] == own
        for token, own, top in zip(*(listed[name][1:] for name in ("tokens", *LISTS[:2])), strict=True)
    )
    assert [choice["text"][offset:][:1] for offset in listed["text_offset"]] == listed["tokens"]


def test_echoes_of_one_prompt_are_equal_whatever_is_cached(served: Served) -> None:
    asked = {"prompt": "the same long prompt", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
    first = ask(served, TEXT, **asked)
    assert ask(served, TEXT, **{**asked, "logprobs": None})["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    again = ask(served, TEXT, **asked)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == first["choices"]
    many = ask(served, TEXT, **{**asked, "prompt": ["abc", asked["prompt"]], "n": 2})["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in many[2:]] == [first["choices"][0]["logprobs"]] * 2


@pytest.mark.parametrize("top", [None, 0, 3])
def test_a_chat_lists_its_tokens_with_their_bytes(served: Served, top: int | None) -> None:
    asked = {"messages": HELLO, "max_tokens": 12, "temperature": 0.9, "seed": 3, "logprobs": True}
    (choice,) = ask(served, CHAT, **asked, top_logprobs=top)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] < 0
        assert len(entry["top_logprobs"]) == (top or 0)
        values = [best["logprob"] for best in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert all(
            best["logprob"] == entry["logprob"] for best in entry["top_logprobs"] if best["token"] == entry["token"]
        )


WANTED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "logprobs": True, "top_logprobs": 2},
    TEXT: {"prompt": "abc", "logprobs": 2},
}
STOPS: list[dict[str, Any]] = [{}, {"stop": ["xyzzy", "~~~"]}, {"n": 3}, {"max_tokens": 1}, {"max_tokens": 0}]


@pytest.mark.parametrize("interval", [None, 5])
@pytest.mark.parametrize("options", STOPS, ids=str)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_streams_chunks_hold_each_once(
    served: Served, path: str, options: dict[str, Any], interval: int | None
) -> None:
    shape: dict[str, Any] = (
        {"messages": HELLO, "logprobs": True, "top_logprobs": 2} if path == CHAT else {"prompt": "abc"}
    )
    if path == TEXT:
        shape |= {"logprobs": 2, "echo": True}
    asked = {"max_tokens": 14, "temperature": 0.9, "seed": 3, "return_token_ids": True, **shape, **options}
    whole = ask(served, path, **asked)["choices"]
    *events, done = served.post(path, {**asked, "stream": True, "stream_interval": interval}).events
    assert done == "[DONE]"
    for expected in whole:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == expected["index"]]
        listed = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        for name, values in expected["logprobs"].items():
            if values is not None:
                assert [value for part in listed for value in part[name]] == values
        for part in parts:  # where the tokens are, their log-probabilities are
            count = len(part["logprobs"][names_of(path)]) if part["logprobs"] else 0
            prompt = len(part.get("prompt_token_ids", ())) if path == TEXT else 0
            assert count == len(part.get("token_ids", ())) + prompt


def names_of(path: str) -> str:
    return "content" if path == CHAT else "tokens"


def test_a_stop_string_takes_text_away_and_no_tokens(served: Served) -> None:
    asked = {"prompt": "abc", "max_tokens": 14, "temperature": 0.9, "seed": 3, "logprobs": 0}
    text = ask(served, TEXT, **asked)["choices"][0]["text"]
    for size in (1, 2, 3):
        stop = text[5 : 5 + size]
        choice = ask(served, TEXT, **asked, stop=stop, return_token_ids=True)["choices"][0]
        end = text.index(stop)
        assert choice["text"] == text[:end]
        assert "".join(choice["logprobs"]["tokens"]) == text[: end + size]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_tokens_may_be_called_by_their_ids(served: Served, path: str) -> None:
    asked: dict[str, Any] = (
        {"messages": HELLO, "logprobs": True, "top_logprobs": 2} if path == CHAT else {"prompt": "abc"}
    )
    asked |= {"logprobs": 2} if path == TEXT else {}
    body = {**asked, "max_tokens": 6, "return_token_ids": True, "return_tokens_as_token_ids": True, "seed": 3}
    (choice,) = ask(served, path, **body)["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    if path == TEXT:
        assert choice["logprobs"]["tokens"] == names
        assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
        assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    else:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == names


def test_openais_client_reads_both_forms(served: Served) -> None:
    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        text = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=3, echo=True)
        listed = text.choices[0].logprobs
        assert listed is not None
        assert listed.tokens is not None
        assert "".join(listed.tokens) == text.choices[0].text
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "abc"}], max_tokens=5, logprobs=True, top_logprobs=2
        )
        content = chat.choices[0].logprobs
        assert content is not None
        assert [len(entry.top_logprobs) for entry in content.content or ()] == [2] * 5


def test_a_bundle_without_them_refuses_the_field(pairs: Pairs, tmp_path: Any) -> None:
    old = restage(pairs.bundle(NAMES[3]), tmp_path / "old", capabilities=("greedy_acceptance",))
    with serve(lambda metrics: model(old, metrics)) as running:
        for path, body in ((TEXT, {"prompt": "abc", "logprobs": 1}), (CHAT, {"messages": HELLO, "logprobs": True})):
            reply = running.post(path, body)
            assert (reply.status, reply.error["param"]) == (400, "logprobs")
            assert "build it again" in reply.error["message"]


class Names(TokenNames):
    """Token i is the i-th of some texts."""

    def __init__(self, *contents: bytes) -> None:
        self._as_ids, self._contents = False, contents

    def content(self, token_id: int) -> bytes:
        return self._contents[token_id]


def test_tokens_of_one_text_stay_apart() -> None:
    """The largest number is still the largest, and that of the token itself is there."""
    score = TokenLogprob(token_id=2, logprob=-3.0, top=((0, -1.0), (1, -2.0)))
    names = Names(b"same", b"\xe2\x82", b"same")
    listed = completion_logprobs([ScoredToken(token_id=2, offset=4, score=score)], names)
    assert listed["top_logprobs"] == [{"same": -1.0, "bytes:\\xe2\\x82": -2.0, "token_id:2": -3.0}]
    (entry,) = chat_logprobs([ScoredToken(token_id=2, offset=4, score=score)], names)["content"]
    assert [(best["token"], best["bytes"]) for best in entry["top_logprobs"]] == [
        ("same", list(b"same")),
        ("\ufffd", [0xE2, 0x82]),
    ]


def test_what_is_impossible_is_a_number_that_json_has() -> None:
    score = TokenLogprob(token_id=0, logprob=float("-inf"), top=((1, 0.0),))
    listed = completion_logprobs([ScoredToken(token_id=0, offset=0, score=score)], Names(b"a", b"b"))
    assert listed["token_logprobs"] == [-9999.0]


def test_offsets_are_places_in_the_text(pairs: Pairs) -> None:
    tokenizer = Tokenizer.load(pairs.bundle(NAMES[2]))
    text = tokenizer.decode([70, 71, 70])
    assert [text[offset:] for offset in text_offsets(tokenizer, [70, 71, 70])] == [text, text[1:], text[2:]]
