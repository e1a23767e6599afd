"""BatchRun: the requests of a batch file through the server's routes, so many at a time, each written when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from starlette.types import ASGIApp

from phonograph.errors import CoreError, PlanError
from phonograph.server.batch.calls import Answer, post
from phonograph.server.batch.files import Done, digest
from phonograph.server.batch.lines import (
    BadLineError,
    BatchRequest,
    BatchResult,
    answered,
    failure_in,
    read_request,
    written,
)

_TRIES = 3
"""Attempts for a request during which the engine core died: the request may be the cause."""
_READ_AHEAD = 16
"""Lines read ahead of the requests in flight."""
_LONGEST_WAIT = 5.0
"""Seconds until a request that found the queue full is sent again."""

Line = tuple[int, bytes | BadLineError]
Lines = Iterator[Line]


@dataclass
class Tally:
    """Counts of a run so far."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    """Lines that an earlier run has answered."""

    @property
    def done(self) -> int:
        return self.succeeded + self.failed + self.skipped


class BatchRun:
    """One run over a file. Memory grows with the requests in flight, and by a few bytes for each line."""

    def __init__(
        self,
        app: ASGIApp,
        output: BinaryIO,
        *,
        most: int,
        done: Done,
        report: Callable[[str], None],
        progress: Callable[[Tally], None],
    ) -> None:
        """`most` requests are in flight; `report` is told of every line that failed."""
        self.tally = Tally()
        self._app = app
        self._output = output
        self._free = asyncio.Semaphore(most)
        self._done = done
        self._seen: dict[bytes, int] = {}
        self._report = report
        self._progress = progress

    async def run(self, lines: Lines, lost: Awaitable[str], *, waits: bool = True) -> Tally:
        """Answer all lines; on cancellation the output keeps what was written.

        `lost` completes when the core will not be restarted again; `waits` says that input may arrive slowly, as
        from a pipe.
        """
        gone = asyncio.ensure_future(lost)
        work = asyncio.create_task(self._all(_read_aside(lines) if waits else _read(lines)))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                _refuse_lost(gone.result())
            await work
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return self.tally

    async def _all(self, lines: AsyncIterator[Line]) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for number, line in lines:
                try:
                    request = self._checked(number, line)
                except BadLineError as bad:
                    self._failed(number, bad.result(number), bad.message)
                    continue
                if request is None:
                    self.tally.skipped += 1
                    continue
                await self._free.acquire()
                tasks.create_task(self._answer(number, request))

    def _checked(self, number: int, line: bytes | BadLineError) -> BatchRequest | None:
        """The request of a line; None if an earlier run answered it."""
        if number in self._done.lines:
            return None
        if isinstance(line, BadLineError):
            raise line
        try:
            request = read_request(line)
        except BadLineError as bad:
            if bad.custom_id is not None and digest(bad.custom_id) in self._done.ids:
                return None
            raise
        name = digest(request.custom_id)
        if name in self._done.ids:
            return None
        first = self._seen.setdefault(name, number)
        if first != number:
            problem = f"line {first} has the same `custom_id`. Give every request its own."
            raise BadLineError("duplicate_custom_id", problem, request.custom_id)
        return request

    async def _answer(self, number: int, request: BatchRequest) -> None:
        try:
            found = await self._sent(request)
        finally:
            self._free.release()
        body = bytes(found.body)
        result = answered(request, found.status, body)
        if found.status < 400:
            self.tally.succeeded += 1
            self._write(result)
        else:
            self._failed(number, result, failure_in(found.status, body))

    async def _sent(self, request: BatchRequest) -> Answer:
        """The response; a request that found the queue full, or whose core died, is sent again."""
        body, tries = bytes(request.body), 0
        while True:
            found = await post(self._app, request.url, body)
            if found.status == 503:
                tries += 1
            if found.status not in (429, 503) or tries >= _TRIES:
                return found
            await asyncio.sleep(min(float(found.headers.get("retry-after", 1)), _LONGEST_WAIT))

    def _failed(self, number: int, result: BatchResult, message: str) -> None:
        self.tally.failed += 1
        self._report(f"line {number}: {message}")
        self._write(result)

    def _write(self, result: BatchResult) -> None:
        """A whole line at a time, so that an interrupted run leaves a file that --resume can continue."""
        try:
            self._output.write(written(result))
            self._output.flush()
        except OSError as error:
            raise PlanError(
                f"writing the output: {error.strerror or error}. Free some space, and continue with --resume."
            ) from None
        self._progress(self.tally)


async def _read(lines: Lines) -> AsyncIterator[Line]:
    for line in lines:
        yield line


async def _read_aside(lines: Lines) -> AsyncIterator[Line]:
    """Lines, read by a daemon thread, since reading from a pipe may block for long."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[Line | Exception | None] = asyncio.Queue(_READ_AHEAD)

    def put(found: Line | Exception | None) -> None:
        asyncio.run_coroutine_threadsafe(waiting.put(found), loop).result()

    def read() -> None:
        with contextlib.suppress(RuntimeError, CancelledError):  # the event loop is closed
            try:
                for found in lines:
                    put(found)
                put(None)
            except OSError as error:
                put(PlanError(f"reading the input: {error.strerror or error}."))

    threading.Thread(target=read, name="batch lines", daemon=True).start()
    while (found := await waiting.get()) is not None:
        if isinstance(found, Exception):
            raise found
        yield found


def _refuse_lost(reason: str) -> NoReturn:
    raise CoreError(f"{reason}. Finished responses are in the output; run it again with --resume to continue.")
