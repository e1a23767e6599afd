"""Access: API keys, allowed Host headers and CORS."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phonograph.server.http.failures import ApiError

_API = "/v1/"


class KeyGuard:
    """Wraps an app: a request without a valid key gets a 401, except on open paths, and below those that end in `/*`.

    A key comes as `Authorization: Bearer KEY`, or as the password of Basic authentication, which browsers ask for.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = frozenset(open_paths)
        self._open_below = tuple(path[:-1] for path in open_paths if path.endswith("/*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            given = _key_in(Headers(scope=scope).get("authorization", ""))
            if not self._is_known(given):
                await self._refusal(scope["path"], given).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(self._open_below)

    def _is_known(self, key: bytes | None) -> bool:
        """In constant time: the digest is compared in full with that of every key."""
        digest = _digest(key or b"")
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key is not None and any(matches)

    def _refusal(self, path: str, key: bytes | None) -> ApiError:
        problem = "there is no API key in the request" if key is None else "the API key is not valid"
        scheme = "Bearer" if path.startswith(_API) else 'Basic realm="phonograph"'
        return ApiError(
            401,
            f"{problem}. Send the header Authorization: Bearer KEY.",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": scheme},
        )


class CorsGuard(CORSMiddleware):
    """CORS for the given origins; other origins get an error body of the usual form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code < 400:
            return found
        problem = f"{bytes(found.body).decode()} for {request_headers['origin'][:100]!r}"
        refusal = ApiError(400, f"{problem}. Start the server with --cors-origins.", code="cors_refused")
        refusal.headers = {name: value for name, value in found.headers.items() if not name.startswith("content-")}
        return refusal.response()


class HostGuard:
    """Wraps an app: a request whose Host header has another name is refused.

    Against DNS rebinding: a web page can let its own name resolve to this machine, and would then count as of the
    same origin as the server; its browser still sends that name in the Host header.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            refusal = self._refusal(given, scope["http_version"])
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, given: list[str], version: str) -> ApiError | None:
        if len(given) > 1 or (not given and version == "1.1"):
            return ApiError(400, f"the request has {len(given)} Host headers; expected one.", code="invalid_host")
        if given and _name_in(given[0]) not in self._hosts:
            problem = f"the Host header names {given[0][:100]!r}; expected one of {', '.join(sorted(self._hosts))}"
            return ApiError(403, f"{problem}. Use such an address, or start with --allowed-hosts.", code="invalid_host")
        return None


def _name_in(host: str) -> str:
    """The name in a Host header, without the port and without the brackets of an IPv6 address."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def owner_of(headers: Headers) -> bytes:
    """The owner of a request: a digest of its API key, which does not reveal the key."""
    return _digest(_key_in(headers.get("authorization", "")) or b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_in(header: str) -> bytes | None:
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and value:
        return value.encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2] or None
        except (binascii.Error, ValueError):
            return None
    return None
