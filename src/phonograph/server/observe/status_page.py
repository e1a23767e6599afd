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
from phonograph.server.observe.request_book import MAX_REQUESTS
from phonograph.server.observe.status import StatusKeeper

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
    "/page/parts.js": ("parts.js", "text/javascript; charset=utf-8"),
    "/page/speculation.js": ("speculation.js", "text/javascript; charset=utf-8"),
    "/page/request.js": ("request.js", "text/javascript; charset=utf-8"),
}
_REQUEST_PAGE = "/requests/{id:path}"
PUBLIC_PATHS = frozenset((*_FILES, "/requests/*"))
"""Paths open without an API key: the pages themselves, which have no figures in them."""

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
    """`/`, the page of a request, their figures, and `/metrics`; `refresh` is called before figures are read."""
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

    async def story(request: Request) -> Response:
        name = request.query_params.get("id", "")
        refresh()
        found = keeper.story(name)
        if found is None:
            problem = f"no request {name[:100]!r} is kept here: of the latest {MAX_REQUESTS} none is called so."
            raise ApiError(404, problem, param="id", code="not_found")
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return Response(encode(found), media_type="application/json", headers=headers)

    async def metrics(request: Request) -> Response:
        refresh()
        return Response(exposition.text(), headers={"Content-Type": CONTENT_TYPE})

    return [
        *(_file_route(path, name, kind) for path, (name, kind) in _FILES.items()),
        _file_route(_REQUEST_PAGE, "request.html", "text/html; charset=utf-8"),
        Route("/status.json", status),
        Route("/request.json", story),
        Route("/metrics", metrics),
    ]


def _file_route(path: str, name: str, kind: str) -> Route:
    content = (files("phonograph.server.observe") / "page" / name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers={**_HEADERS, "Content-Type": kind})

    return Route(path, serve)
