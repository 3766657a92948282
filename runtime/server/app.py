"""The routes. Each reads its body, calls what answers it, and turns any error into OpenAI's error object."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from graphspec import __version__
from graphspec.errors import GraphspecError, RequestError

from .answers import Answers, abandoned_on_disconnect
from .chat import chat_job
from .completions import completion_job
from .errors import ApiError, as_api_error, invalid, unavailable
from .job import Job, Object
from .metrics import CONTENT_TYPE, Metrics
from .model import Model
from .openapi import openapi
from .schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from .streaming import EventStream, as_json
from .tokenizing import detokenize, tokenize, tokenizer_info

MAX_BODY = 16 * 2**20
"""Bytes of a request."""
_LONG = 2**18
"""Bytes of a request that is made ready by itself: its tokens take a hundred times its memory."""
HUNG_UP = 499
"""Nobody reads it; logs show it."""
REQUEST_ID = "x-request-id"


@dataclass(slots=True, kw_only=True)
class Serving:
    """What the routes need to know of the server around them."""

    names: Sequence[str]
    """What clients may call the model; the first is what it calls itself."""
    api_key: str | None = None
    metrics: Metrics
    model: Model | None = None
    """None while it loads."""
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    one_long: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def ready(self) -> Model:
        """The model. Raises ApiError while there is none that takes requests."""
        if self.draining:
            raise unavailable("the server is shutting down")
        if self.model is None:
            raise unavailable("the model is still loading")
        return self.model

    def named(self, name: str | None) -> str:
        """What the client calls the model. Raises ApiError for one that is not served here."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name[:200]!r} is not served here: there is {served}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_key(self, request: Request) -> None:
        """Raises ApiError unless the request has the key, if there is one."""
        if self.api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode("latin-1"), self.api_key.encode()
        ):
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


T = TypeVar("T")
Handler = Callable[[Serving, Request], Awaitable[Response]]


class Json(JSONResponse):
    """Any text can be in it: half of a surrogate pair that a client sent too."""

    def render(self, content: object) -> bytes:
        return as_json(content)


def create_app(serving: Serving) -> Starlette:
    """The whole server; `serving.model` may come later."""

    def route(path: str, handler: Handler, method: str = "GET", *, open_to_all: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if not open_to_all:
                    serving.check_key(request)
                response = await handler(serving, request)
            except ClientDisconnect:
                response = Response(status_code=HUNG_UP)
            except GraphspecError as error:
                response = _failed(as_api_error(error))
            # The client's own, for its log; OpenAI's client shows it with every answer and error.
            response.headers[REQUEST_ID] = request.headers.get(REQUEST_ID, "")[:200] or secrets.token_hex(16)
            return response

        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/v1/chat/completions", _chat, "POST"),
            route("/v1/completions", _completions, "POST"),
            route("/v1/models", _models),
            route("/v1/models/{name:path}", _one_model),
            route("/tokenize", _tokenize, "POST"),
            route("/detokenize", _detokenize, "POST"),
            route("/tokenizer_info", _tokenizer_info),
            route("/health", _alive, open_to_all=True),
            route("/ping", _alive, open_to_all=True),
            route("/health/ready", _ready, open_to_all=True),
            route("/version", _version, open_to_all=True),
            route("/metrics", _metrics, open_to_all=True),
            route("/openapi.json", _openapi, open_to_all=True),
        ],
        exception_handlers={HTTPException: _no_route, Exception: _crashed},
    )


async def _chat(serving: Serving, request: Request) -> Response:
    def job(content: bytes) -> Job:
        body = parse(ChatBody, content)
        name, model = serving.named(body.model), serving.ready()
        return chat_job(body, model, name)

    return await _answer(serving, request, await _read(serving, request, job))


async def _completions(serving: Serving, request: Request) -> Response:
    def job(content: bytes) -> Job:
        body = parse(CompletionBody, content)
        name, model = serving.named(body.model), serving.ready()
        return completion_job(body, model.bundle, name)

    return await _answer(serving, request, await _read(serving, request, job))


async def _answer(serving: Serving, request: Request, job: Job) -> Response:
    model = serving.ready()
    limits = [limit for limit in (job.body.timeout, model.request_timeout) if limit is not None]
    answers = Answers(model.scheduler, job.requests, serving.metrics, timeout=min(limits, default=None))
    try:
        answers.start()
    except RequestError as error:
        raise invalid(job.body.field_of(str(error), job.param), str(error)) from None
    if job.body.stream:
        return EventStream(job, answers)
    async with abandoned_on_disconnect(request.receive, answers):
        generations = await answers.all()
        return await run_in_threadpool(lambda: Json(job.response(generations)))


async def _models(serving: Serving, _: Request) -> Response:
    return Json({"object": "list", "data": [_card(serving, name) for name in serving.names]})


async def _one_model(serving: Serving, request: Request) -> Response:
    return Json(_card(serving, serving.named(request.path_params["name"])))


def _card(serving: Serving, name: str) -> Object:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "graphspec",
        "root": serving.names[0],
        "parent": None,
        "max_model_len": serving.ready().bundle.manifest.max_length,
    }


async def _tokenize(serving: Serving, request: Request) -> Response:
    def told(content: bytes) -> Response:
        body = parse(TokenizeBody, content)
        serving.named(body.model)
        return Json(tokenize(body, serving.ready().bundle))

    try:
        return await _read(serving, request, told)
    except RequestError as error:
        raise invalid("prompt", str(error)) from None


async def _detokenize(serving: Serving, request: Request) -> Response:
    def told(content: bytes) -> Response:
        body = parse(DetokenizeBody, content)
        serving.named(body.model)
        return Json(detokenize(body, serving.ready().bundle))

    return await _read(serving, request, told)


async def _tokenizer_info(serving: Serving, _: Request) -> Response:
    return Json(tokenizer_info(serving.ready().bundle))


async def _alive(_: Serving, __: Request) -> Response:
    return Json({})


async def _ready(serving: Serving, _: Request) -> Response:
    serving.ready()
    return Json({})


async def _version(_: Serving, __: Request) -> Response:
    return Json({"version": __version__})


async def _metrics(serving: Serving, _: Request) -> Response:
    return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE)


async def _openapi(serving: Serving, _: Request) -> Response:
    model = serving.model
    vocabulary = None if model is None else model.bundle.manifest.pair.target.vocab_size
    return Json(openapi(with_key=serving.api_key is not None, vocabulary=vocabulary))


async def _read(serving: Serving, request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body, in a thread; of long ones, one at a time."""
    content = await _content(request)
    if len(content) <= _LONG:
        return await run_in_threadpool(read, content)
    async with serving.one_long:
        return await run_in_threadpool(read, content)


async def _content(request: Request) -> bytes:
    """The body. Raises ApiError if it is too long, before it is all read."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {MAX_BODY} bytes: send less at once"
            )
    return bytes(content)


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.NOT_FOUND
    said = HTTPStatus(status).phrase
    headers = getattr(error, "headers", None)
    return _failed(ApiError(status, f"{request.method} {request.url.path[:200]}: {said}", headers=headers))


async def _crashed(_: Request, error: Exception) -> Response:
    return _failed(as_api_error(error))


def _failed(error: ApiError) -> Response:
    return Json(error.body, status_code=error.status, headers=error.headers)
