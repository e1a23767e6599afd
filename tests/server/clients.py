"""A client that costs little, so that two hundred of them fit into a test; and a front in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.server.app import create_app
from phonograph.server.options import ServerOptions
from phonograph.server.run import Server, listen


class Connection:
    """One request over a socket of its own; the answer is read when and as far as somebody asks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, port: int, path: str, body: object, *, receive_buffer: int | None = None) -> Connection:
        """Connect and send the request."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=receive_buffer or 65536)
        connection = cls(reader, writer)
        connection.send(path, body)
        return connection

    def send(self, path: str, body: object) -> None:
        """Send a request, also behind one that is not answered yet."""
        data = json.dumps(body).encode()
        self._writer.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(data))
            + data
        )

    async def head(self) -> int:
        """Read the status and the headers."""
        self.status = int((await self._reader.readline()).split()[1])
        while (line := (await self._reader.readline()).strip()) != b"":
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        return self.status

    async def body(self) -> Any:
        """Read a body of JSON."""
        if not self.status:
            await self.head()
        return json.loads(await self._reader.readexactly(int(self.headers["content-length"])))

    async def events(self) -> AsyncIterator[Any]:
        """Read server-sent events, up to the last."""
        if not self.status:
            await self.head()
        assert self.status == 200, await self.body()
        data = b""
        while size := int(await self._reader.readline(), 16):
            data += (await self._reader.readexactly(size + 2))[:-2]
            *whole, data = data.split(b"\n\n")
            for event in whole:
                if event != b"data: [DONE]":
                    yield json.loads(event.removeprefix(b"data: "))
        assert not data

    async def close(self) -> None:
        """Leave, without a word."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@dataclass(frozen=True)
class Front:
    """A server whose front runs in this event loop, so that tests can look inside."""

    llm: AsyncLLM
    port: int


@asynccontextmanager
async def front(llm: AsyncLLM, options: ServerOptions, *, send_buffer: int | None = None) -> AsyncIterator[Front]:
    """Serve an AsyncLLM that runs already."""
    with listen(options) as sock:
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        app = create_app(llm, options)
        server = Server(app, options)
        serving = asyncio.create_task(server._serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield Front(llm, sock.getsockname()[1])
        server.should_exit = server.force_exit = True
        await serving
