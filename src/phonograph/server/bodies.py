"""Reads the body of a request within its limits, and says what to change where it does not fit."""

from __future__ import annotations

import asyncio
import difflib
import re
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from phonograph.server.failures import ApiError

T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?([\w.\[\]]*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")


class BodyReader(Generic[T]):
    """Reads bodies of one kind."""

    def __init__(self, kind: type[T], max_bytes: int, seconds: float) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._fields = tuple(field.encode_name for field in msgspec.structs.fields(kind))
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def read(self, request: Request) -> tuple[T, int]:
        """The body and how many bytes it had; ApiError where it can't be read."""
        data = await self._bytes(request)
        try:
            return self._decode(data), len(data)
        except msgspec.ValidationError as error:
            raise self._misfit(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no valid JSON: {_sentence(error, data)}", code="invalid_json") from None

    async def _bytes(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not arrive within {self._seconds:g} s. Send it faster, or make it smaller."
            raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(499, "the client is gone.") from None
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes:,} bytes. Send less, or raise --max-body-bytes."
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})

    def _misfit(self, problem: str) -> ApiError:
        """The sentence of the decoder, with the field that it is about."""
        if found := _UNKNOWN.search(problem):
            name = found[1]
            near = difflib.get_close_matches(name[:100], self._fields, 1)
            hint = f"did you mean `{near[0]}`?" if near else "it would have no effect here: leave it out."
            return ApiError(400, f"unknown field `{name[:100]}`; {hint}", param=name[:100], code="unknown_field")
        if found := _MISSING.search(problem):
            return ApiError(400, f"`{found[1]}` is missing. Add it.", param=found[1], code="missing_field")
        place = _PLACE.search(problem)
        where = place[1] if place else ""
        said = problem[: place.start()] if place else problem
        said = said[:1].lower() + said[1:]
        if where:
            return ApiError(400, f"`{where}`: {said}.", param=where, code="invalid_value")
        return ApiError(400, f"the body: {said}.", code="invalid_value")


def _sentence(error: Exception, data: bytes) -> str:
    if not data:
        return "it is empty. Send an object."
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8. Encode it so."
    if isinstance(error, RecursionError):
        return "it is nested too deeply. Make it flat."
    hint = " NaN and Infinity are no JSON numbers." if re.search(rb"\bNaN\b|\bInfinity\b", data) else ""
    return f"{str(error).removeprefix('JSON is malformed: ')}.{hint} Send one JSON object in UTF-8."
