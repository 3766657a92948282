"""What a client is told when something goes wrong: OpenAI's error object, and a status that says whose fault it is.

Clients repeat what ends in 429 and 5xx, so a client's own mistake is never one of those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from graphspec.errors import GraphspecError, RequestError

from ..refusals import DeadlineError, QueueFullError, RefusedError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ApiError(GraphspecError):
    """A request ends with this status and error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """The client's mistake, in the field `param`."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """The server is not serving now."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, headers={"Retry-After": "1"})


def as_api_error(error: Exception, *, param: str | None = None) -> ApiError:
    """The error a client sees for one of ours; `param` is the field an invalid request is about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return invalid(param, str(error))
    if isinstance(error, RefusedError):
        full = isinstance(error, QueueFullError)
        status = HTTPStatus.TOO_MANY_REQUESTS if full else HTTPStatus.SERVICE_UNAVAILABLE
        wait = str(max(1, math.ceil(error.retry_after)))
        code = "timeout" if isinstance(error, DeadlineError) else None
        return ApiError(status, str(error), code=code, headers={"Retry-After": wait})
    said = str(error) if isinstance(error, GraphspecError) else "internal error; the server's log has the traceback"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, said)
