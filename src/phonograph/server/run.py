"""Server process: binds the socket, starts the core, serves, and on a signal drains running requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.errors import CoreError, PlanError
from phonograph.graphs.progress import Progress, silent
from phonograph.server.http.guard import Door, GuardedProtocol, room_for_connections
from phonograph.server.options import ServerOptions

log = logging.getLogger("phonograph")

_BACKLOG = 2048
_LAST_WORDS = 5
"""Seconds for responses to reach their clients after the engine has finished."""
_SWITCH = 0.0005
"""Interpreter switch interval: a thread that works on a long text may hold up the event loop for this long. Python's
default is ten times that."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(options: ServerOptions) -> socket.socket:
    """The socket, bound before anything slow begins."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        sock = socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        raise PlanError(f"listening on {where}: {error.strerror or error}. Choose another --host or --port.") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Accepted connections inherit it: one whose client reads nothing for so long is dropped.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.stall_timeout * 1000))
    return sock


class Server(uvicorn.Server):
    """uvicorn with guarded connections, without its signal handlers, which would close the socket before draining."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        door = Door(min(options.max_connections, room_for_connections()), options.head_timeout)
        config = uvicorn.Config(
            app,
            http=partial(GuardedProtocol, door),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        super().__init__(config)
        self._door = door

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log connections that could not be accepted; everything else goes to the default handler."""
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in str(context.get("message")):
            self._door.warn(f"a connection could not be accepted: {error}")
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(
    llm: AsyncLLM,
    app: ASGIApp,
    options: ServerOptions,
    sock: socket.socket,
    *,
    progress: Progress = silent,
    on_ready: Callable[[], None] = lambda: None,
) -> signal.Signals | None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for running requests. Returns a signal that came before
    the server was ready."""
    server = Server(app, options)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with _handled(signals):
        asyncio.get_running_loop().set_exception_handler(server.on_loop_error)
        listening = asyncio.create_task(server.serve(sockets=[sock]))
        listening.add_done_callback(lambda _: signals.put_nowait(signal.SIGTERM))  # no new connections from here on
        try:
            early = await _started(llm, progress, signals)
            if early is None:
                # What was loaded stays: exempt it from garbage collection, whose pauses would delay all requests.
                gc.collect()
                gc.freeze()
                sys.setswitchinterval(_SWITCH)
                on_ready()
                received = await _signal(llm, signals)
                await _drained(llm, options.drain_timeout, received, signals)
        finally:
            await llm.stop()
            server.should_exit = True
            await listening
    return early


@contextlib.contextmanager
def _handled(signals: asyncio.Queue[signal.Signals]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _started(llm: AsyncLLM, progress: Progress, signals: asyncio.Queue[signal.Signals]) -> signal.Signals | None:
    """Start the core; returns a signal that came first."""
    starting = asyncio.create_task(llm.start(progress))
    received = asyncio.create_task(signals.get())
    await asyncio.wait((starting, received), return_when=asyncio.FIRST_COMPLETED)
    if received.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return received.result()
    received.cancel()
    await starting
    return None


async def _signal(llm: AsyncLLM, signals: asyncio.Queue[signal.Signals]) -> signal.Signals:
    """Wait for a signal; a core that is not started again is an error."""
    received, lost = asyncio.create_task(signals.get()), asyncio.create_task(llm.lost())
    await asyncio.wait((received, lost), return_when=asyncio.FIRST_COMPLETED)
    if not received.done():
        received.cancel()
        raise CoreError(f"{lost.result()}. The server stops. See the log for the cause, and start it again.")
    lost.cancel()
    return received.result()


async def _drained(
    llm: AsyncLLM, seconds: float, received: signal.Signals, signals: asyncio.Queue[signal.Signals]
) -> None:
    """Wait for running requests, up to the timeout or a second signal."""
    log.warning("%s: finishing %d sequences, at most %g s", received.name, llm.num_active, seconds)
    draining = asyncio.create_task(llm.drain(seconds))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    draining.cancel()
    if llm.num_active:
        log.warning("aborting %d sequences that did not finish", llm.num_active)
