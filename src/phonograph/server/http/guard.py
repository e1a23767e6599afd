"""Connection guard: headers of limited size and time, and no more connections than can be served.

uvicorn's protocol for httptools has no such bounds of its own; this subclass adds them, before the app sees anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from phonograph.server.http.failures import SERVER, ApiError
from phonograph.server.http.request_limits import HEADERS, NUM_HEADERS, PIPELINED, URL

log = logging.getLogger("phonograph")

_RESERVE = 32
"""File descriptors reserved for the core's restart, files and the like, at most a quarter of all."""
_LINGERING = 8
"""Refused connections, out of the reserve, that stay open until their client has read why."""
_MANY = 65536
_LINGER = 2.0
"""Seconds for which a refused client may go on sending, so that it reads the refusal and not a reset."""
_WARN_EVERY = 60.0
_UPGRADE_HEADERS = frozenset((b"upgrade", b"http2-settings"))
_PIECES = 2048
"""Chunks of a body in one read: more are so small that parsing them costs too much."""
_QUEUED = 64 << 10
"""Bytes of pipelined requests' bodies that are buffered: reading goes on so that a disconnect is noticed."""


def room_for_connections() -> int:
    """How many connections this process has file descriptors for; raises its soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else min(hard, _MANY)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = _MANY if soft == resource.RLIM_INFINITY else soft
    return max(1, limit - min(_RESERVE, limit // 4) - len(os.listdir("/dev/fd")))


@dataclass
class Door:
    """All connections of a server: how many there are, and which of them may be closed."""

    max_connections: int
    head_timeout: float
    open: set[GuardedProtocol] = field(default_factory=set)
    idle: dict[GuardedProtocol, None] = field(default_factory=dict)
    """Connections without a request, the longest idle first."""
    receiving: dict[GuardedProtocol, None] = field(default_factory=dict)
    """Connections whose request body is still arriving, the oldest first."""
    lingering: dict[GuardedProtocol, None] = field(default_factory=dict)
    """Connections that were refused and are not closed yet, the oldest first; they are not among the open ones."""
    _warned: float = -_WARN_EVERY

    def admit(self, one: GuardedProtocol) -> bool:
        """Admit a connection; at the limit an idle one is closed for it. False if there is none."""
        if len(self.open) >= self.max_connections:
            self.warn(f"{len(self.open)} connections are open, as many as can be; idle ones are closed for new ones")
            leaving = next(iter(self.idle or self.receiving), None)
            if leaving is None:
                return False
            leaving.leave()
        self.open.add(one)
        self.idle[one] = None
        return True

    def forget(self, one: GuardedProtocol) -> None:
        """A connection is gone."""
        self.open.discard(one)
        self.idle.pop(one, None)
        self.receiving.pop(one, None)
        self.lingering.pop(one, None)

    def linger(self, one: GuardedProtocol) -> None:
        """Refuse a connection; it stays until its client has read why, or until there are too many such."""
        self.forget(one)
        self.lingering[one] = None
        if len(self.lingering) > _LINGERING:
            next(iter(self.lingering)).leave()

    def warn(self, problem: str) -> None:
        """Log a warning at most once a minute: a flood of connections must not flood the log."""
        now = time.monotonic()
        if now - self._warned >= _WARN_EVERY:
            self._warned = now
            log.warning("HTTP: %s", problem)


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, door: Door, **given: Any) -> None:
        super().__init__(**given)
        self._door = door
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_over = False
        """Whether further input is discarded."""
        self._has_message = False
        """Whether a request has begun to arrive and is not complete."""
        self._in_head = False
        self._ended_now = False
        self._asks_upgrade = False
        self._takes_no_more = False
        """Whether the connection closes after responses to the requests received so far."""
        self._without_response: list[RequestResponseCycle] = []
        """The running request, and pipelined ones after it."""
        self._head_bytes = self._line_bytes = self._pieces = 0

    # -- the connection ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._door.admit(self):
            busy = "all connections are in use by running requests. Try again later."
            self._refuse(ApiError(503, busy, type=SERVER, code="busy", headers={"Retry-After": "1"}))
            return
        self._arm(self._door.head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._door.forget(self)
        self.pipeline.clear()
        for cycle in self._without_response:  # uvicorn notifies only the newest cycle
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Close the connection at once."""
        self._door.forget(self)
        self._is_over = True
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        if not self._has_message and self._timer is None:
            self._arm(self._door.head_timeout)
        self._ended_now, self._pieces = False, 0
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade:
            # CONNECT: the request gets a response as it is, and what follows is not HTTP.
            self.cycle.keep_alive, self._is_over = False, True
            return
        except httptools.HttpParserError:
            if self._takes_no_more:
                self.cycle.keep_alive, self._is_over = False, True
                return
            problem = "the request is not valid HTTP. Send HTTP/1.1."
            self._refuse(self._refusal or ApiError(400, problem, code="invalid_http"))
            return
        if self._in_head and not self._ended_now:  # otherwise the data begins with the end of the previous request
            self._head_bytes += len(data)
            if self._head_bytes > HEADERS.most:
                self._refuse(HEADERS.refusal(f"{self._head_bytes:,} or more", HEADERS.field, 431))

    def _parse(self, data: bytes) -> None:
        """Feed the parser; a request with an Upgrade header is parsed again without it, as HTTP/1.1 allows.

        The parser would take everything after the headers of such a request, its body too, as the other protocol.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            if not self._asks_upgrade:
                raise
            self._asks_upgrade = False
            head = _plain_head(self.parser, self.url, self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self._parse(head + data[found.args[0] :])

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm(self._door.head_timeout)  # the next request may wait for the response to this one
            return
        if self.cycle is not None and not self._in_head:  # a keep-alive connection, or a body that does not end
            self.transport.close()
            return
        seconds = self._door.head_timeout
        self._refuse(ApiError(408, f"no request came within {seconds:g} s. Send it at once.", code="head_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Respond, unless another response is being written, and close the connection."""
        self._disarm()
        self._is_over = True
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.close()
                return
            self.cycle.disconnected = True  # the request is refused while its body arrives; the app need not respond
            self.cycle.message_event.set()
        self.transport.write(_written(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._door.linger(self)
        self.loop.call_later(_LINGER, self.transport.close)

    # -- what the parser finds ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_message = self._in_head = True
        self._head_bytes = self._line_bytes = 0
        if len(self.pipeline) >= PIPELINED.most:
            self._takes_no_more = True
            raise _RefusedError
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL.most:
            self._stop(URL.refusal(f"{len(self.url):,}", URL.field, 414))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            found = value[:100].decode("latin-1")
            problem = f"the Transfer-Encoding is {found!r}; expected chunked. Send the body as it is."
            self._stop(ApiError(400, problem, code="unsupported_encoding"))
        self._line_bytes += len(name) + len(value) + 4
        if len(self.headers) > NUM_HEADERS.most:
            self._stop(NUM_HEADERS.refusal(f"more than {NUM_HEADERS.most}", NUM_HEADERS.field, 431))
        if self._line_bytes > HEADERS.most:
            self._stop(HEADERS.refusal(f"{self._line_bytes:,} or more", HEADERS.field, 431))

    def on_headers_complete(self) -> None:
        self._asks_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._asks_upgrade:
            return
        self._in_head = False
        self._disarm()
        self._door.idle.pop(self, None)
        self._door.receiving[self] = None
        super().on_headers_complete()
        self._without_response = [
            *(cycle for cycle in self._without_response if not cycle.response_complete),
            self.cycle,
        ]
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn pauses reading, and so would not notice a disconnect
        if self.parser.get_http_version() == "1.0":
            _end_with_connection(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        if self._pieces > _PIECES:
            self._stop(ApiError(400, "the body comes in chunks of a few bytes. Send larger ones.", code="small_chunks"))
        if self.pipeline and sum(len(cycle.body) for cycle, _ in self.pipeline) + len(body) > _QUEUED:
            self._drop_newest()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_upgrade:
            return
        self._has_message, self._ended_now = False, True
        self._disarm()
        self._door.receiving.pop(self, None)
        super().on_message_complete()
        if self.cycle.response_complete:  # the response was complete before the body
            self._door.idle[self] = None
            self._arm(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._has_message and not self._in_head:
            self._arm(_LINGER)  # a body that nobody reads any more must end soon
        elif not self.pipeline and self.cycle.response_complete:
            self._door.idle[self] = None

    def _drop_newest(self) -> None:
        """Drop the pipelined request whose body is arriving: the connection closes after the responses before it."""
        self.pipeline.popleft()
        self._without_response.pop()
        self.cycle = self._without_response[-1]
        self._door.receiving.pop(self, None)
        self._takes_no_more = True
        raise _RefusedError

    def _stop(self, refusal: ApiError) -> None:
        """Stop the parser: the rest of its input is not parsed."""
        self._refusal = refusal
        raise _RefusedError


class _RefusedError(Exception):
    """Raised through the parser, which wraps it in an error of its own."""


def _plain_head(parser: httptools.HttpRequestParser, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a request, without an upgrade to another protocol."""
    lines = [b"%s %s HTTP/%s" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            kept = [option for option in value.split(b",") if option.strip().lower() not in _UPGRADE_HEADERS]
            lines.append(name + b": " + b",".join(kept))
        elif name not in _UPGRADE_HEADERS:
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """For HTTP/1.0, which has no chunked encoding: a response without a length ends with the connection."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def unframed(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    setattr(cycle, "send", unframed)  # noqa: B010 (a method of this one object)


def _written(error: ApiError) -> bytes:
    """A whole HTTP response with an error body, for a request that never reaches the app."""
    response = error.response()
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
