"""In-process calls: a request to an ASGI app without a socket."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

log = logging.getLogger("phonograph")


@dataclass
class Answer:
    """Status, headers and body of a response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Send a JSON body; on cancellation the app sees a client disconnect."""
    found, is_read = Answer(), False
    gone = asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await gone
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.status = message["status"]
            found.headers = {name.decode().lower(): value.decode() for name, value in message.get("headers", ())}
        else:
            found.body += message.get("body", b"")

    try:
        await app(_scope(path, len(body)), receive, send)
    except Exception:
        if not found.status:
            raise
        log.debug(
            "the app raised after it had answered", exc_info=True
        )  # Starlette sends a 500 and raises for an unexpected exception
    finally:
        gone.cancel()
    return found


def _scope(path: str, size: int) -> dict[str, Any]:
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(size)}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
    }
