"""CoreClient: the front's side of the engine core: starts its process, exchanges messages, restarts it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.channel import Frames, frame
from phonograph.engine.process.messages import (
    Failed,
    FromCore,
    IntegrityReport,
    LoadProgress,
    Logged,
    Ready,
    Shutdown,
    StepOutput,
    ToCore,
)
from phonograph.errors import CoreError
from phonograph.graphs.progress import Progress, silent

log = logging.getLogger("phonograph")

_DYING = 5.0
"""Seconds that a process may take to end once its channel is closed."""

_RESTING = 60.0
"""Seconds, several times the heartbeat interval of an idle core."""


@dataclass(frozen=True)
class Restarts:
    """When to restart a core that died."""

    most: int = 5
    """Attempts in a row, without `steady` seconds of service between them; 0 never starts it again."""
    wait: float = 0.5
    """Seconds before the first attempt; twice as long before each further one."""
    longest_wait: float = 30.0
    steady: float = 60.0
    silence: float = 300.0
    """Seconds of silence after which a core is killed: it hangs. One with nothing to do has a little longer."""


class Listener(Protocol):
    """Receives the messages of the core; all calls come from the event loop."""

    @property
    def busy_since(self) -> float | None:
        """Since when the core has been busy without a pause, in seconds of `time.monotonic`."""

    def ready(self, found: Ready) -> None:
        """The core accepts requests, for the first time or again."""

    def stepped(self, output: StepOutput) -> None: ...

    def checked(self, found: IntegrityReport) -> None: ...

    def down(self, reason: str, *, final: bool) -> None:
        """The core died, with all of its state; `final` if it will not be restarted."""


class _Wire(asyncio.Protocol):
    """The connection to one core process: decodes its messages, and knows how it ended."""

    def __init__(self, listener: Listener, progress: Progress) -> None:
        self._listener = listener
        self._progress = progress
        self._frames = Frames()
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.failure: Failed | None = None
        self.heard = time.monotonic()

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        for found in self._frames.add(data):
            self._handle(self._decode(found))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)

    def _handle(self, message: FromCore) -> None:
        match message:
            case StepOutput():
                self._listener.stepped(message)
            case LoadProgress(doing, done, total):
                self._progress(doing, done, total)
            case Ready():
                self.ready.set_result(message)
            case IntegrityReport():
                self._listener.checked(message)
            case Logged(level, text):
                log.log(level, "core: %s", text)
            case Failed():
                self.failure = message


class CoreClient:
    """Keeps one core process running; messages sent while none runs are dropped, and the listener knows."""

    def __init__(
        self,
        arguments: EngineArguments,
        listener: Listener,
        restarts: Restarts = Restarts(),
        log_level: int = logging.WARNING,
    ) -> None:
        self._arguments = arguments
        self._listener = listener
        self._restarts = restarts
        self._log_level = log_level
        self._encode = msgspec.msgpack.Encoder().encode
        self._outbox: list[msgspec.Raw] = []
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._wire: _Wire | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The core's process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self, progress: Progress = silent) -> Ready:
        """Start the core and wait until it takes requests; from then on it is kept running."""
        found = await self._start(progress)
        self._keeper = asyncio.create_task(self._keep_running(), name="core keeper")
        return found

    def encoded(self, message: ToCore) -> msgspec.Raw:
        """A message as it is sent, made in any thread; one that can't be encoded is an error of its sender alone."""
        return msgspec.Raw(msgspec.msgpack.encode(message))

    def send(self, message: ToCore | msgspec.Raw) -> None:
        """Send to the core; all messages of one turn of the event loop go in one frame."""
        encoded = message if isinstance(message, msgspec.Raw) else self.encoded(message)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(encoded)

    async def stop(self, patience: float = _DYING) -> None:
        """End the core; if it does not end by itself within `patience` seconds, it is killed."""
        self._is_stopping = True
        self.send(Shutdown())
        if self._process is not None:
            await self._ended(self._process, patience)
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(self._encode(messages)))

    # -- one process ------------------------------------------------------------------------------------------------

    async def _start(self, progress: Progress) -> Ready:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own keeps a terminal's Ctrl-C away from the core: the front tells it when to end.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "phonograph.engine.process.core_loop", str(theirs.fileno()), str(self._log_level)),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, wire = await loop.create_unix_connection(lambda: _Wire(self._listener, progress), sock=ours)
        self._wire = wire
        self._transport.write(frame(pickle.dumps(self._arguments)))
        try:
            await asyncio.wait((wire.ready, wire.closed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._transport.close()  # which ends the process
            raise
        if not wire.ready.done():
            raise CoreError(await self._end())
        found = wire.ready.result()
        self._listener.ready(found)
        return found

    async def _end(self) -> str:
        """Wait for the process whose channel is closed, and say why it ended."""
        assert self._process is not None
        assert self._wire is not None
        status = await self._ended(self._process, _DYING)
        self._process = self._transport = None
        if self._wire.failure is not None:
            return self._wire.failure.reason
        if status < 0:
            hint = "; the machine may be out of memory" if status == -signal.SIGKILL else ""
            return f"the engine core was killed by {signal.Signals(-status).name}{hint}"
        return f"the engine core exited with status {status}"

    @staticmethod
    async def _ended(process: asyncio.subprocess.Process, patience: float) -> int:
        try:
            return await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            log.warning("the engine core did not exit within %.0f s and is killed", patience)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return await process.wait()

    # -- restarts ---------------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            reason, lasted = await self._until_gone()
            if self._is_stopping:
                return
            failures = 0 if lasted > self._restarts.steady else failures
            while True:
                final = failures >= self._restarts.most
                log.error("the engine core is down: %s%s", reason, "; it will not be restarted" if final else "")
                self._listener.down(reason, final=final)
                if final:
                    return
                await asyncio.sleep(min(self._restarts.wait * 2**failures, self._restarts.longest_wait))
                failures += 1
                try:
                    await self._start(silent)
                except CoreError as error:
                    reason = str(error)
                else:
                    log.warning("the engine core is running again")
                    break

    async def _until_gone(self) -> tuple[str, float]:
        """Wait until the running core is gone: why, and how many seconds it lasted."""
        assert self._wire is not None
        assert self._process is not None
        begin, silence = time.monotonic(), self._restarts.silence
        killed = ""
        while not (await asyncio.wait([self._wire.closed], timeout=silence / 4))[0]:
            since = self._listener.busy_since
            allowed = silence if since is not None else silence + _RESTING
            if time.monotonic() - max(since or begin, self._wire.heard) > allowed:
                killed = f"the engine core was silent for {allowed:g} s; it was killed"
                self._process.kill()
        reason = await self._end()
        return killed or reason, time.monotonic() - begin
