"""Brings an answer to its client, whole or as a stream, and stops the work when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phonograph.engine.generation import Delta, Generation
from phonograph.server.failures import ApiError, failure_of, failure_of_finish
from phonograph.server.writers import Writer

log = logging.getLogger("phonograph")

DONE = b"data: [DONE]\n\n"
GONE = 499
"""What the log calls an answer that nobody waits for any more."""


class Watch:
    """Closes a generation as soon as its client is gone."""

    def __init__(self, receive: Receive, generation: Generation) -> None:
        self._receive = receive
        self._generation = generation
        self.is_gone = False
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Watch:
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


async def whole(request: Request, generation: Generation, writer: Writer, timeout: float | None) -> Response:
    """The answer in one body."""
    async with generation:
        with Watch(request.receive, generation) as watch:
            choices = await generation.whole()
        if watch.is_gone:
            return Response(status_code=GONE)
        _check(choices, timeout)
        return Response(writer.body(choices, generation.usage), media_type="application/json")


async def stream(
    request: Request, generation: Generation, writer: Writer, timeout: float | None, *, with_usage: bool
) -> Response:
    """The answer as server-sent events; what fails before the first token has a status of its own."""
    try:
        with Watch(request.receive, generation) as watch:
            first = await generation.take()
        if watch.is_gone:
            return Response(status_code=GONE)
        _check(first, timeout)
    except BaseException:
        generation.close()
        raise
    return EventStream(generation, writer, first, timeout, with_usage=with_usage)


def _check(deltas: Sequence[Delta], timeout: float | None) -> None:
    """Raise if a choice did not end well."""
    for delta in deltas:
        if delta.finish is not None:
            failure = failure_of_finish(delta.finish, delta.error, timeout)
            if failure is not None:
                raise failure


class EventStream(Response):
    """Sends all that is new at once, whenever the client can take more: one chunk for many tokens if it is slow."""

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        first: list[Delta],
        timeout: float | None,
        *,
        with_usage: bool,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._first = first
        self._timeout = timeout
        self._with_usage = with_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            with Watch(receive, generation):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    deltas = self._first
                    while deltas:
                        _check(deltas, self._timeout)
                        if found := self._writer.events(deltas):
                            await send({"type": "http.response.body", "body": found, "more_body": True})
                        deltas = await generation.take()
                    end = self._writer.usage_event(generation.usage) if self._with_usage else b""
                except ApiError as error:
                    end = error.event()
                except Exception as error:
                    end = failure_of(error).event()
                await send({"type": "http.response.body", "body": end + DONE, "more_body": False})
