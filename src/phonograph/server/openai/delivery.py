"""Delivery: sends a response, whole or as a stream, and aborts its generation when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phonograph.engine.process.generation import Delta, Generation
from phonograph.server.http.bodies import OffLoop
from phonograph.server.http.failures import failure_of, failure_of_finish
from phonograph.server.http.request_log import RequestLog
from phonograph.server.openai.writers import ResponseWriter, split

_CHARS_OF_AN_ENTRY = 256
"""Characters of text that take as long to encode as one logprob."""
_BYTES_OF_AN_ENTRY = 32
"""Bytes of a vector, or token ids, that take as long to encode as one logprob."""
NOTE_HEADER = "X-Phonograph-Note"
GONE = 499
"""The status of a response whose client has disconnected (for the log)."""


class DisconnectWatch:
    """Waits for the client to disconnect, and then aborts its generation."""

    def __init__(self, receive: Receive, generation: Generation) -> None:
        self._receive = receive
        self._generation = generation
        self.is_gone = False
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> DisconnectWatch:
        self._task = asyncio.create_task(self._wait())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._generation.close()


@dataclass(frozen=True)
class Delivery:
    """One response being sent."""

    generation: Generation
    writer: ResponseWriter
    log: RequestLog
    timeout: float | None
    """The request's timeout in seconds, for the error message."""
    off_loop: OffLoop
    """Runs the encoding of large responses outside the event loop."""
    notes: Sequence[str] = ()
    """Fields of the request that have no effect: sent in a header."""

    @property
    def headers(self) -> dict[str, str]:
        return {NOTE_HEADER: "; ".join(self.notes)} if self.notes else {}

    async def whole(self, request: Request) -> Response:
        """The response in one body."""
        async with self.generation as generation:
            with DisconnectWatch(request.receive, generation) as client, self._failures_logged():
                choices = await generation.whole()
                self.check(choices)
            if client.is_gone:
                self.log.end(generation, "left by its client")
                return Response(status_code=GONE)
            self.log.end(generation, "done")
            weight = _weight(choices) + self.writer.size // _CHARS_OF_AN_ENTRY
            body = await self.off_loop(weight, lambda: self.writer.body(choices, generation.usage))
            return WholeResponse(body, self.headers)

    async def events(self, deltas: Sequence[Delta]) -> bytes:
        """Server-sent events for new deltas."""
        return await self.off_loop(_weight(deltas), lambda: self.writer.events(deltas))

    async def end(self) -> bytes:
        """The last events."""
        weight = self.writer.size // _CHARS_OF_AN_ENTRY
        return await self.off_loop(weight, lambda: self.writer.end(self.generation.usage))

    async def stream(self, request: Request) -> Response:
        """The response as server-sent events; a failure before the first token still gets its own HTTP status."""
        try:
            with DisconnectWatch(request.receive, self.generation) as client, self._failures_logged():
                first = await self.generation.take()
                self.check(first)
        except BaseException:
            self.generation.close()
            raise
        if client.is_gone:
            self.log.end(self.generation, "left by its client")
            return Response(status_code=GONE)
        return EventStream(self, first)

    def check(self, deltas: Sequence[Delta]) -> None:
        """Raise if a choice failed or timed out."""
        self.log.outputs(deltas)
        for delta in deltas:
            if (failure := failure_of_finish(delta, self.timeout)) is not None:
                raise failure

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.log.end(self.generation, self.log.failed(error))
            raise


def _weight(deltas: Sequence[Delta]) -> int:
    """About how long these take to encode, in the unit of `off_loop`; all tokens have as many alternatives."""
    found = [found for delta in deltas for found in (delta.logprobs, delta.prompt_logprobs) if found]
    entries = sum(len(tokens) * (1 + len(tokens[0].top)) for tokens in found)
    numbers = sum(len(delta.embedding) + len(delta.tokens) for delta in deltas) // _BYTES_OF_AN_ENTRY
    return entries + numbers + len(deltas) + sum(len(delta.text) for delta in deltas) // _CHARS_OF_AN_ENTRY


class WholeResponse(Response):
    """A body in pieces, sent as fast as the client reads them."""

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str]) -> None:
        size = str(sum(map(len, pieces)))
        super().__init__(headers={"Content-Length": size, **headers}, media_type="application/json")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = len(self._pieces) - 1
        for place, piece in enumerate(self._pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": place < last})


class EventStream(Response):
    """Sends all new deltas whenever the client can take more: a slow client gets many tokens in one chunk."""

    def __init__(self, delivery: Delivery, first: list[Delta]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **delivery.headers}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._delivery = delivery
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = self._delivery
        async with delivery.generation as generation:
            with DisconnectWatch(receive, generation) as client:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                end, outcome = b"", "streamed"
                try:
                    await self._send_all(send)
                    end = await delivery.end()
                except Exception as error:
                    end, outcome = delivery.writer.failure(failure_of(error)), delivery.log.failed(error)
                await send({"type": "http.response.body", "body": end, "more_body": False})
            delivery.log.end(generation, "left by its client" if client.is_gone else outcome)

    async def _send_all(self, send: Send) -> None:
        delivery, deltas = self._delivery, self._first
        while deltas:
            for group in split(deltas):
                if found := await delivery.events(group):
                    await send({"type": "http.response.body", "body": found, "more_body": True})
            deltas = await delivery.generation.take()
            delivery.check(deltas)
