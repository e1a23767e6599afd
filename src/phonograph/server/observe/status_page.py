"""Status page: its routes, its document and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phonograph.server.http.failures import ApiError
from phonograph.server.observe.exposition import CONTENT_TYPE, Exposition
from phonograph.server.observe.status import StatusKeeper

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
}
PUBLIC_PATHS = frozenset(_FILES)
"""What is served without an API key: the page itself, which has no figures in it."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FAR = 2**53


def routes(keeper: StatusKeeper, exposition: Exposition, refresh: Callable[[], None] = lambda: None) -> list[Route]:
    """`/` with its files, `/status.json` and `/metrics`; `refresh` is called before figures are read."""
    encode = msgspec.json.Encoder().encode

    async def status(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 20):
            problem = f"`since` is {since[:100]!r}; expected the number of the first point to send."
            raise ApiError(400, problem, param="since", code="invalid_value")
        number = min(int(since), _FAR)
        refresh()
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return Response(encode(keeper.status(number)), media_type="application/json", headers=headers)

    async def metrics(request: Request) -> Response:
        refresh()
        return Response(exposition.text(), headers={"Content-Type": CONTENT_TYPE})

    return [
        *(_file_route(path, name, kind) for path, (name, kind) in _FILES.items()),
        Route("/status.json", status),
        Route("/metrics", metrics),
    ]


def _file_route(path: str, name: str, kind: str) -> Route:
    content = (files("phonograph.server.observe") / "page" / name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers={**_HEADERS, "Content-Type": kind})

    return Route(path, serve)
