"""Failures: exceptions as OpenAI error bodies with the right status."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from phonograph.engine.process.generation import Delta
from phonograph.engine.requests.request import FinishReason
from phonograph.errors import CoreError, CoverageError, RequestError, UnavailableError

INVALID = "invalid_request_error"
SERVER = "server_error"

_encode = msgspec.json.Encoder().encode


class Error(msgspec.Struct, frozen=True):
    """What went wrong, and what to change."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every response that is not a success."""

    error: Error


class ApiError(Exception):
    """Ends a request with this status and error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        detail: str = "",
    ) -> None:
        self.status = status
        self.detail = detail
        """For the log only."""
        self.error = Error(message, type, param, code)
        self.headers = headers or {}
        super().__init__(message)

    def response(self) -> Response:
        return Response(_encode(ErrorBody(self.error)), self.status, self.headers, "application/json")

    def event(self) -> bytes:
        """As an event, for a stream whose status has been sent."""
        return b"data: " + _encode(ErrorBody(self.error)) + b"\n\n"


def unknown_field(name: str, known: Iterable[str], place: str = "") -> ApiError:
    """For an unknown field, which would be ignored silently; `place` is the object that has it."""
    near = difflib.get_close_matches(name[:100], known, 1)
    hint = f"did you mean `{place}{near[0]}`?" if near else "it would have no effect here: leave it out."
    where = f"{place}{name[:100]}"
    return ApiError(400, f"unknown field `{where}`; {hint}", param=where, code="unknown_field")


def failure_of(error: Exception) -> ApiError:
    """The error that the client gets for an exception; an unexpected one reveals nothing internal."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.field)
        case UnavailableError(reason="queue_full"):
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers)
        case UnavailableError():
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            if error.reason == "draining":
                headers["Connection"] = "close"
            return ApiError(503, str(error), type=SERVER, code=error.reason, headers=headers)
        case CoreError():
            return ApiError(503, str(error), type=SERVER, code="core_down", headers={"Retry-After": "5"})
        case HTTPException():
            return _http_failure(error)
    return ApiError(500, "an unexpected error; the server's log has the details.", type=SERVER, code="internal_error")


def failure_of_finish(delta: Delta, timeout: float | None) -> ApiError | None:
    """The error that the client gets for a choice that failed or timed out."""
    if delta.finish is FinishReason.DEADLINE:
        said = f"the request did not finish within its {timeout:g} s. " if timeout is not None else ""
        return ApiError(504, f"{said}Request fewer tokens, or try again later.", type=SERVER, code="deadline_exceeded")
    if delta.finish is FinishReason.ERROR and delta.error_field:
        return ApiError(400, delta.error, param=delta.error_field)
    if delta.finish is FinishReason.ERROR and delta.error.startswith(f"{CoverageError.__name__}: "):
        message = (
            "the server may only use recorded graphs (--graphs strict), and has none for this step, or mistrusts the "
            "one it had. The request is not at fault; the server's log has the details."
        )
        return ApiError(500, message, type=SERVER, code="no_graph", detail=delta.error)
    if delta.finish is FinishReason.ERROR:
        message = "the model failed on this request. The server's log has the details; change the request."
        return ApiError(500, message, type=SERVER, code="model_error", detail=delta.error)
    return None


def _http_failure(error: HTTPException) -> ApiError:
    """The router's own errors: 404 and 405."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return ApiError(404, "there is no such route; see /openapi.json.", code="unknown_route", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        return ApiError(405, f"this route takes {allowed}.", code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)


async def respond(request: Request, error: Exception) -> Response:
    """Starlette's handler for all exceptions."""
    return failure_of(error).response()
