"""GET /openapi.json: what each route takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from graphspec import __version__

from .job import Object
from .schemas import REFUSED, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REFERENCE = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"


def _object(**properties: Any) -> Object:
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING, _NUMBER, _LIST, _ANY = {"type": "string"}, {"type": "integer"}, {"type": "array"}, {"type": "object"}
_COMPLETION = _object(id=_STRING, object=_STRING, created=_NUMBER, model=_STRING, choices=_LIST, usage=_ANY)
_CARD = _object(id=_STRING, object={"const": "model"}, max_model_len=_NUMBER)
_READY = {503: "loading, or shutting down"}
_ASKED = {400: "a field cannot be honoured", 404: "no such model", 413: "too long", **_READY}
_QUEUED = {429: "the queue is full", 500: "the engine failed", **_ASKED}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """What a route does."""

    summary: str
    body: type | None = None
    """Of a POST; None: a GET."""
    gives: Mapping[str, Object] = field(default_factory=lambda: {_JSON: _ANY})
    """Schemas by content type."""
    failures: Mapping[int, str] = field(default_factory=dict)


_OPERATIONS: Mapping[str, _Operation] = {
    "/v1/chat/completions": _Operation(
        summary="Answers a chat.", body=ChatBody, gives={_JSON: _COMPLETION, _EVENTS: {}}, failures=_QUEUED
    ),
    "/v1/completions": _Operation(
        summary="Continues prompts.",
        body=CompletionBody,
        gives={_JSON: _COMPLETION, _EVENTS: {}},
        failures=_QUEUED,
    ),
    "/v1/models": _Operation(
        summary="What is served.", gives={_JSON: _object(object={"const": "list"}, data=_LIST)}, failures=_READY
    ),
    "/v1/models/{name}": _Operation(
        summary="One model.", gives={_JSON: _CARD}, failures={404: "no such model", **_READY}
    ),
    "/tokenize": _Operation(
        summary="Token ids of a text or a chat.",
        body=TokenizeBody,
        gives={_JSON: _object(count=_NUMBER, tokens=_LIST)},
        failures=_ASKED,
    ),
    "/detokenize": _Operation(
        summary="The text of token ids.", body=DetokenizeBody, gives={_JSON: _object(prompt=_STRING)}, failures=_ASKED
    ),
    "/tokenizer_info": _Operation(summary="What clients that render chats need.", failures=_READY),
    "/health": _Operation(summary="Whether the process lives."),
    "/ping": _Operation(summary="Whether the process lives."),
    "/health/ready": _Operation(summary="Whether requests are taken.", failures=_READY),
    "/version": _Operation(summary="Of graphspec.", gives={_JSON: _object(version=_STRING)}),
    "/metrics": _Operation(summary="In Prometheus' format.", gives={_TEXT: _STRING}),
    "/openapi.json": _Operation(summary="This document."),
}


@cache
def openapi(*, with_key: bool, vocabulary: int | None) -> Object:
    """The document. `with_key`: clients must send one; `vocabulary`: tokens of the model, if it is known yet."""
    _, schemas = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE + "{model}")
    definitions = schemas["$defs"]
    for body, needed in ((ChatBody, "messages"), (CompletionBody, "prompt")):
        definitions[body.__name__] |= _given(needed)
        definitions[body.__name__]["properties"] |= {name: _refused(values) for name, values in REFUSED.items()}
    definitions[TokenizeBody.__name__]["anyOf"] = [_given("prompt"), _given("messages")]
    last = {} if vocabulary is None else {"maximum": vocabulary - 1}
    document: Object = {
        "openapi": "3.1.0",
        "info": {"title": "graphspec", "version": __version__},
        "paths": {path: _path(path, operation, with_key=with_key) for path, operation in _OPERATIONS.items()},
        "components": {
            "schemas": {**definitions, "TokenId": {"type": "integer", "minimum": 0, **last}, "Error": _ERROR}
        },
    }
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": list[str]()}]
    return document


def _given(name: str) -> Object:
    """A field that may be null for pydantic, and is needed all the same."""
    return {"required": [name], "allOf": [{"properties": {name: {"not": {"type": "null"}}}}]}


def _refused(values: tuple[Any, ...]) -> Object:
    return {"enum": [None, *values], "description": "Only what asks for nothing: this server cannot honour it."}


def _path(path: str, operation: _Operation, *, with_key: bool) -> Object:
    done = {"description": "done", "content": {kind: {"schema": schema} for kind, schema in operation.gives.items()}}
    failures = {**operation.failures, **({401: "the key is missing or wrong"} if with_key else {})}
    error = {_JSON: {"schema": {"$ref": _REFERENCE + "Error"}}}
    told: Object = {
        "summary": operation.summary,
        "responses": {"200": done}
        | {str(status): {"description": said, "content": error} for status, said in failures.items()},
    }
    if operation.body is not None:
        schema = {"$ref": _REFERENCE + operation.body.__name__}
        told["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if "{name}" in path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    return {"get" if operation.body is None else "post": told}
