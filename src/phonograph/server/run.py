"""Runs the server: listens, starts the core, and on a signal finishes what runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from phonograph.engine.async_llm import AsyncLLM
from phonograph.errors import PlanError
from phonograph.graphs.progress import Progress, silent
from phonograph.server.options import ServerOptions

log = logging.getLogger("phonograph")

_BACKLOG = 2048
_LAST_WORDS = 5
"""Seconds that answers have to reach their clients after the engine has finished."""
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
        # Accepted connections inherit it: one that takes nothing for so long is dropped, and frees what it held.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.stall_timeout * 1000))
    return sock


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would stop listening before what runs has finished."""

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
) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for what runs."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_LAST_WORDS,
    )
    server = _Server(config)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with _handled(signals):
        listening = asyncio.create_task(server.serve(sockets=[sock]))
        listening.add_done_callback(lambda _: signals.put_nowait(signal.SIGTERM))  # nothing comes in any more
        try:
            if await _started(llm, progress, signals):
                on_ready()
                await _drained(llm, options.drain_timeout, await signals.get(), signals)
        finally:
            await llm.stop()
            server.should_exit = True
            await listening


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


async def _started(llm: AsyncLLM, progress: Progress, signals: asyncio.Queue[signal.Signals]) -> bool:
    """Start the core; False if a signal came first."""
    starting = asyncio.create_task(llm.start(progress))
    told = asyncio.create_task(signals.get())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return False
    told.cancel()
    await starting
    return True


async def _drained(llm: AsyncLLM, seconds: float, told: signal.Signals, signals: asyncio.Queue[signal.Signals]) -> None:
    """Wait for what runs, but not longer than allowed, nor past a second signal."""
    log.warning("%s: finishing %d sequences, at most %g s", told.name, llm.num_active, seconds)
    draining = asyncio.create_task(llm.drain(seconds))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    draining.cancel()
    if llm.num_active:
        log.warning("giving up %d sequences", llm.num_active)
