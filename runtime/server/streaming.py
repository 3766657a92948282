"""Server-sent events: each piece of an answer as it comes."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphspec.errors import GraphspecError

from ..answer import Generation, Piece
from .answers import Answers, abandoned_on_disconnect
from .errors import as_api_error
from .job import Job, Object, Writer

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def as_json(value: object) -> bytes:
    """In ASCII: some clients split events at any character that Unicode calls a line break."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()


class EventStream(Response):
    """The answers of a job as events; a client that hangs up ends them."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, answers: Answers) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job, self._answers = job, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async def write(content: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        async with abandoned_on_disconnect(receive, self._answers):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in _events(self._job, self._answers):
                await write(event)
            await write(b"", more=False)


async def _events(job: Job, answers: Answers) -> AsyncIterator[bytes]:
    stream = _Stream(job)
    try:
        async for index, piece in answers:
            for chunk in stream.chunks(index, piece):
                yield _event(chunk)
    except ClientDisconnect:
        return
    except Exception as error:
        if not isinstance(error, GraphspecError):
            log.exception("a stream failed")
        yield _event(as_api_error(error).body)
        return
    if stream.include_usage:
        yield _event(stream.account())
    yield DONE


class _Stream:
    """Which chunks a piece becomes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        options = job.body.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._writers = dict[int, Writer]()
        self._text_ends = defaultdict[int, int](int)
        self._num_tokens = 0
        self._generations: list[Generation] = []

    def chunks(self, index: int, piece: Piece) -> list[Object]:
        """The first piece of a choice opens it, and the last one closes it."""
        text, ended, first = piece.text, piece.generation, index not in self._writers
        self._num_tokens += len(piece.token_ids)
        if first:
            self._writers[index] = self._job.form.writer()
            text = self._job.echo(index) + text
        writer = self._writers[index]
        choices = writer.deltas(text, last=ended is not None)
        if ended is not None:
            self._generations.append(ended)
            reason = {"finish_reason": writer.finish_reason(ended.finish_reason), "stop_reason": ended.stop_reason}
            choices.append(writer.empty() | reason)
        elif not choices:
            choices.append(writer.empty())  # a step took place, which is what benchmarks time
        choices[0] |= self._ids(index, piece, first=first) | self._logprobs(index, piece)
        if first and (opening := writer.opening()) is not None:
            choices.insert(0, opening)
        return [self._chunk([{"index": index, "logprobs": None, "finish_reason": None} | one]) for one in choices]

    def account(self) -> Object:
        """The last chunk: usage, and no choices."""
        return self._job.envelope(self._job.form.chunk_name, []) | self._job.account(self._generations)

    def _chunk(self, choices: Sequence[Object]) -> Object:
        chunk = self._job.envelope(self._job.form.chunk_name, choices)
        if self._continuous:
            chunk["usage"] = self._job.usage(self._num_tokens)
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, index: int, piece: Piece) -> Object:
        """With the tokens that they are of, whether or not their text has come."""
        start = self._text_ends[index]
        if piece.text_ends:
            self._text_ends[index] = piece.text_ends[-1]
        if not (piece.token_ids or piece.prompt_logprobs):
            return {}
        return {"logprobs": self._job.logprobs(index, piece, text_start=start)}

    def _ids(self, index: int, piece: Piece, *, first: bool) -> Object:
        if not self._job.body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self._job.prompts[index // self._job.body.num_choices])} if first else {}
        return {**prompt, "token_ids": list(piece.token_ids)}


def _event(value: Any) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"
