"""Batch lines: one request of a batch file, parsed and checked, and its line of the output file."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from phonograph.server.http.failures import ErrorBody

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_ID_CHARS = 512
_SHOWN = 100


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the input."""

    custom_id: str
    """The id that matches an output line to its request."""
    method: str
    url: str
    body: msgspec.Raw
    """JSON, passed to the route unchanged."""


class BatchResponse(msgspec.Struct, frozen=True):
    """A route's response."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a line never reached a route."""

    code: str
    message: str
    line: int = 0
    """Its line number in the input."""


class BatchResult(msgspec.Struct, frozen=True):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class _Identified(msgspec.Struct):
    id: str | None = None


class _Streamed(msgspec.Struct):
    stream: bool | None = None


class _WithId(msgspec.Struct):
    custom_id: str | None = None


class BadLineError(Exception):
    """A line that is not a valid request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id

    def result(self, number: int) -> BatchResult:
        """Its line of the output."""
        return _result(self.custom_id, None, BatchError(self.code, f"line {number}: {self.message}", number))


_decode = msgspec.json.Decoder(BatchRequest).decode
_decode_id = msgspec.json.Decoder(_Identified).decode
_decode_streamed = msgspec.json.Decoder(_Streamed).decode
_decode_custom_id = msgspec.json.Decoder(_WithId).decode
_decode_error = msgspec.json.Decoder(ErrorBody).decode
_encode = msgspec.json.Encoder().encode


def read_request(line: bytes) -> BatchRequest:
    """The request of a line; BadLineError, with what to change, if there is none."""
    try:
        request = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = str(error).removeprefix("JSON is malformed: ")
        said = f"{said[:1].lower()}{said[1:]}"
        wanted = 'expected {"custom_id": …, "method": "POST", "url": …, "body": {…}}'
        raise BadLineError("invalid_line", f"{said}; {wanted}.", _id_in(line)) from None
    custom_id = request.custom_id
    if not custom_id or len(custom_id) > MAX_ID_CHARS:
        problem = f"`custom_id` has {len(custom_id):,} characters; expected 1 to {MAX_ID_CHARS}."
        raise BadLineError("invalid_custom_id", problem, custom_id[:MAX_ID_CHARS] or None)
    if request.method != "POST":
        found = repr(request.method[:_SHOWN])
        raise BadLineError("invalid_method", f"`method` is {found}; expected 'POST'.", custom_id)
    if request.url not in URLS:
        found = repr(request.url[:_SHOWN])
        raise BadLineError("invalid_url", f"`url` is {found}; expected {', '.join(URLS)}.", custom_id)
    if _streams(request.body):
        raise BadLineError("invalid_body", "`body.stream` is true, and a file has no streams. Leave it out.", custom_id)
    return request


def answered(request: BatchRequest, status: int, body: bytes) -> BatchResult:
    """The output line for a route's response."""
    try:
        found = _decode_id(body).id
    except msgspec.DecodeError:  # not an error body of ours; the output line must be JSON all the same
        found, body = None, _encode(body.decode(errors="replace"))
    name = found or f"req_{uuid.uuid4().hex}"
    return _result(request.custom_id, BatchResponse(status, name, msgspec.Raw(body)), None)


def failure_in(status: int, body: bytes) -> str:
    """The error of a request that a route refused, or that failed."""
    try:
        return _decode_error(body).error.message
    except msgspec.DecodeError:
        return f"status {status}"


def written(result: BatchResult) -> bytes:
    """A line of the output file."""
    return _encode(result) + b"\n"


def _result(custom_id: str | None, response: BatchResponse | None, error: BatchError | None) -> BatchResult:
    return BatchResult(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)


def _streams(body: msgspec.Raw) -> bool:
    try:
        return bool(_decode_streamed(body).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the route says what is wrong with it


def _id_in(line: bytes) -> str | None:
    """The id of an otherwise invalid line, if it has one."""
    try:
        found: Any = _decode_custom_id(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found[:MAX_ID_CHARS] if found else None
