"""The schema at /openapi.json is true, and whatever is sent that it allows, or does not, is no fault of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import NAMES, Pairs
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from served import model
from starlette.applications import Starlette
from starlette.routing import Route

from graphspec.runtime.answer_format import AnswerFormat
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.server.app import Serving, create_app
from graphspec.runtime.server.metrics import Metrics
from graphspec.runtime.server.openapi import openapi

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{{ message.tool_calls }}:{% endfor %}"
)
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
NEEDED = {"messages", "prompt", "tokens"}
# Of what a schema cannot say (lengths together, JSON in strings), a valid request may be refused.
EXCLUDED = [positive_data_acceptance]
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def application(pairs: Pairs) -> Iterator[Starlette]:
    """Without a socket; in the end it still answers, and as if nothing had been."""
    metrics = Metrics("tiny")
    running = model(pairs.bundle(NAMES[1]), metrics, answers=AnswerFormat(tools="hermes", reasoning=True))
    running.bundle.tokenizer.chat_template = TEMPLATE
    made = create_app(Serving(names=["tiny"], metrics=metrics, model=running))
    yield made
    body: Any = {"prompt": "abc", "max_tokens": 20, "seed": 7, "temperature": 0.9}
    case: Any = schemathesis.openapi.from_asgi("/openapi.json", made)["/v1/completions"]["post"].Case(
        body=body, media_type="application/json"
    )
    (choice,) = case.call().json()["choices"]
    (answer,) = pairs.loaded(NAMES[1]).generate("abc", SamplingParams(max_new_tokens=20, seed=7, temperature=0.9))
    assert choice["text"] == answer.text
    assert running.scheduler.num_running == running.scheduler.num_waiting == 0
    running.scheduler.close()
    running.bundle.close()


@pytest.fixture(scope="module")
def api(application: Starlette) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", application)


def check(case: Any) -> None:
    response = case.call_and_validate(excluded_checks=EXCLUDED)
    if response.headers["content-type"][0].startswith("text/event-stream"):
        *events, rest = response.text.split("\n\n")
        assert (events[-1], rest) == ("data: [DONE]", "")  # a failure on the way would have ended it
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert response.status_code < 500 or error["code"] == "timeout"  # as short as the request says


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_what_the_schema_allows_is_answered_or_refused_with_a_reason(api: Any, path: str) -> None:
    """A few fields at a time: of many, one is always refused first."""

    @given(case=api[path]["post"].as_strategy(generation_mode=GenerationMode.POSITIVE), data=st.data())
    @FUZZ
    def fuzz(case: Any, data: st.DataObject) -> None:
        names = sorted(case.body.keys() - NEEDED)
        kept = data.draw(st.sets(st.sampled_from(names), max_size=5)) if names else set()
        case.body = {name: value for name, value in case.body.items() if name in kept | NEEDED}
        check(case)

    fuzz()


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_what_the_schema_forbids_is_refused(api: Any, path: str) -> None:
    @given(case=api[path]["post"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @FUZZ
    def fuzz(case: Any) -> None:
        check(case)

    fuzz()


def test_what_is_read_is_as_the_schema_says(api: Any) -> None:
    for path, methods in api.raw_schema["paths"].items():
        if "get" in methods:
            check(api[path]["get"].Case(path_parameters={"name": "tiny"} if "{" in path else {}))


def test_the_schema_has_every_route(application: Starlette) -> None:
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in application.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    paths = openapi(with_key=False, vocabulary=None)["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == routes


def test_the_schema_says_what_a_client_must_have() -> None:
    open_to_all, locked = (openapi(with_key=with_key, vocabulary=128) for with_key in (False, True))
    assert "security" not in open_to_all
    assert locked["security"] == [{"key": []}]
    assert "401" in locked["paths"]["/v1/models"]["get"]["responses"]
    assert locked["components"]["schemas"]["TokenId"] == {"type": "integer", "minimum": 0, "maximum": 127}
