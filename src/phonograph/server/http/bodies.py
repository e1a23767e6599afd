"""BodyReader: reads a request's body within its limits, and decodes it; errors name the field and what to change."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from phonograph.server.http.failures import SERVER, ApiError, unknown_field
from phonograph.server.http.json_shape import shape_of
from phonograph.server.http.neutral_fields import NeutralField, without_neutral
from phonograph.server.http.request_limits import ModelBounds

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?([\w.\[\]]*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")
_SMALL = 64 << 10
_JSON = re.compile(r"application/([\w.-]+\+)?json *(;.*)?", re.IGNORECASE)

_CHARSET = re.compile(r"; *charset *= *\"?([^;\" ]*)", re.IGNORECASE)


class OffLoop(Protocol):
    """Run small work in the event loop, large work in a thread."""

    async def __call__(self, size: int, work: Callable[[], R], /) -> R: ...


class Arrivals:
    """Budget for bytes of large bodies being received; past it, further large bodies are refused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def arriving(self) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the size of every chunk; all are returned to the budget at the end."""
        mine, total = 0, 0

        def add(size: int) -> None:
            nonlocal mine, total
            total += size
            if total <= _SMALL:  # bodies of ordinary size are never refused
                return
            if self._held + size > self._most:
                message = f"{self._held:,} of {self._most:,} bytes for bodies are in use. Try again later."
                raise ApiError(503, message, type=SERVER, code="busy", headers={"Retry-After": "1"})
            mine += size
            self._held += size

        try:
            yield add
        finally:
            self._held -= mine


class BodyReader(Generic[T]):
    """Reads bodies of one kind."""

    def __init__(
        self,
        kind: type[T],
        max_bytes: int,
        seconds: float,
        arrivals: Arrivals,
        bounds: Callable[[], ModelBounds],
        neutral: Mapping[str, NeutralField],
    ) -> None:
        """`neutral` are further fields that are accepted at values that change nothing."""
        self._kind = kind
        self._decode = msgspec.json.Decoder(kind).decode
        self._fields = tuple(field.encode_name for field in msgspec.structs.fields(kind))
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._arrivals = arrivals
        self._bounds = bounds
        self._neutral = neutral

    async def read(self, request: Request, off_loop: OffLoop, then: Callable[[T], R]) -> tuple[R, int]:
        """The result of `then` on the decoded body, and the body's size in bytes; ApiError where it can't be read.

        A large body is decoded, and handed to `then`, outside the event loop's thread.
        """
        _refuse_other_types(request)
        with self._arrivals.arriving() as arrived:
            parts = await self._parts(request, arrived)
            bounds, size = self._bounds(), sum(map(len, parts))
            return await off_loop(size, lambda: then(self._decoded(b"".join(parts), bounds))), size

    def _decoded(self, data: bytes, bounds: ModelBounds) -> T:
        bounds.check_shape(shape_of(data, bounds.values.most))
        try:
            try:
                return self._decode(data)
            except msgspec.ValidationError as error:
                if _PLACE.search(str(error)) or not _UNKNOWN.search(str(error)):
                    raise
                return self._decode(without_neutral(data, self._neutral, self._fields))
        except msgspec.ValidationError as error:
            raise self._misfit(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {_sentence(error, data)}", code="invalid_json") from None

    async def _parts(self, request: Request, arrived: Callable[[int], None]) -> list[bytes]:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large(f"{int(announced):,}")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large(f"{size:,} or more")
                    arrived(len(part))
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not arrive within {self._seconds:g} s. Send it faster, or make it smaller."
            raise ApiError(408, message, code="body_timeout") from None
        except ClientDisconnect:
            raise ApiError(499, "the client disconnected.") from None
        return parts

    def _too_large(self, found: str) -> ApiError:
        message = (
            f"the body has {found} bytes; at most {self._max_bytes:,} are taken. Send less, or raise --max-body-bytes."
        )
        return ApiError(413, message, code="body_too_large")

    def _misfit(self, problem: str) -> ApiError:
        """The decoder's message, with the field that it is about."""
        if found := _UNKNOWN.search(problem):
            inside = _PLACE.search(problem)
            return unknown_field(found[1], self._fields) if not inside else self._unknown_inside(inside[1], found[1])
        if found := _MISSING.search(problem):
            return ApiError(400, f"`{found[1]}` is missing. Add it.", param=found[1], code="missing_field")
        place = _PLACE.search(problem)
        where = place[1] if place else ""
        said = problem[: place.start()] if place else problem
        said = said[:1].lower() + said[1:]
        if where:
            return ApiError(400, f"`{where}`: {said}.", param=where, code="invalid_value")
        return ApiError(400, f"the body: {said}.", code="invalid_value")

    def _unknown_inside(self, place: str, name: str) -> ApiError:
        """The known fields of an object in the body."""
        kind = msgspec.inspect.type_info(self._kind)
        assert isinstance(kind, msgspec.inspect.StructType)
        named = [one.type for one in kind.fields if one.encode_name == place]
        parts = [part for one in named for part in (one.types if isinstance(one, msgspec.inspect.UnionType) else [one])]
        known = [
            field.encode_name for part in parts if isinstance(part, msgspec.inspect.StructType) for field in part.fields
        ]
        return unknown_field(name, known, f"{place}.")


def _refuse_other_types(request: Request) -> None:
    """Refuse other content types than JSON: any web page can post forms and plain text across origins, but not JSON."""
    given = request.headers.get("content-type", "")
    if not _JSON.fullmatch(given):
        found = f"is {given[:100]!r}" if given else "is missing"
        message = f"the Content-Type {found}; expected application/json."
        remedy = 'Add the header, with curl -H "Content-Type: application/json".'
        raise ApiError(415, f"{message} {remedy}", code="unsupported_media_type")
    if (charset := _CHARSET.search(given)) and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        message = f"the charset is {charset[1][:100]!r}; JSON is sent as UTF-8. Encode it so, or leave the charset out."
        raise ApiError(415, message, code="unsupported_charset")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the Content-Encoding is {encoding[:100]!r}; expected none. Send the body uncompressed."
        raise ApiError(415, message, code="unsupported_encoding")


def _sentence(error: Exception, data: bytes) -> str:
    if not data:
        return "it is empty. Send an object."
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8. Encode it so."
    if isinstance(error, RecursionError):
        return "it is nested too deeply. Make it flat."
    hint = " NaN and Infinity are not JSON numbers." if re.search(rb"\bNaN\b|\bInfinity\b", data) else ""
    return f"{str(error).removeprefix('JSON is malformed: ')}.{hint} Send one JSON object in UTF-8."
