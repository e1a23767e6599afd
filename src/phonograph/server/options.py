"""ServerOptions: names, limits, times and keys."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from phonograph.errors import PlanError
from phonograph.numbers import expect_whole, is_number, shown

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """The settings of the HTTP side; those of the engine are in `EngineArguments`."""

    host: str = "127.0.0.1"
    """The address to bind; 0.0.0.0 accepts other machines."""
    port: int = 8000
    """0 takes a free one."""
    names: tuple[str, ...] = ()
    """Names of the model in requests; default: the name of its file or folder."""
    api_keys: tuple[str, ...] = ()
    """A request must carry one of them; empty: no authentication."""
    tool_parser: str = "auto"
    """How the model writes tool calls: a name of `tool_formats`, `auto` (as its chat template does), or `none`."""
    reasoning_parser: str = "auto"
    """How it writes reasoning: a name of `reasoning`, `auto` or `none`."""
    content_special_tokens: str = "text"
    """How special tokens in message texts are tokenized: as `text`, or as `special` ones. Requests may override it."""
    max_queue: int = 1024
    """Sequences that may wait in the queue; with more, requests get a 429."""
    response_store_bytes: int = 64 << 20
    """Bytes of stored responses (/v1/responses); 0 stores none."""
    response_store_seconds: float = 24 * 3600.0
    """Seconds for which a response is stored."""
    max_body_bytes: int = 8 << 20
    """A larger body gets a 413."""
    max_prompt_chars: int | None = None
    """Characters of a prompt, or of all messages; default: as many as could fit the context."""
    max_connections: int = 4096
    """Connections at a time; with more, the one that has been idle longest is closed."""
    head_timeout: float = 10.0
    """Seconds in which the headers of a request must arrive, on a new connection too; else a 408."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may have in their Host header; `*` is any. Default: this machine's own where only it can
    connect, else any."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server from a browser; `*` is any."""
    body_timeout: float = 30.0
    """Seconds in which a body must arrive; else a 408."""
    request_timeout: float | None = None
    """Seconds in which a request must be finished; else a 504, or an error event in a stream that has begun."""
    stall_timeout: float = 60.0
    """Seconds for which a client may read nothing of what was sent; then its connection is dropped (on Linux)."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM or SIGINT."""
    log_prompts: bool = False
    """Write prompts and outputs to the log."""

    def __post_init__(self) -> None:
        expect_whole("server options: port", self.port, PlanError, least=0, most=65535)
        for name, least in (
            ("max_queue", 0),
            ("response_store_bytes", 0),
            ("max_body_bytes", 1),
            ("max_connections", 1),
            ("max_prompt_chars", 1),
        ):
            if (value := getattr(self, name)) is not None:
                expect_whole(f"server options: {name}", value, PlanError, least=least)
        for name in (
            "response_store_seconds",
            "head_timeout",
            "body_timeout",
            "request_timeout",
            "stall_timeout",
            "drain_timeout",
        ):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):  # infinity is allowed
                raise PlanError(f"server options: {name} must be above 0 seconds, found {shown(value)}.")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                problem = f"the origin {origin!r} is not as browsers send it"
                raise PlanError(f"server options: {problem}. Write https://name or https://name:port, or `*`.")
        if not all(self.api_keys):
            raise PlanError("server options: an API key is empty. Write one, or give none.")

    @property
    def is_open(self) -> bool:
        """Whether other machines may send requests without a key."""
        return not self.api_keys and not _is_loopback(self.host)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Allowed names in a Host header; empty: any."""
        if self.allowed_hosts:
            return () if "*" in self.allowed_hosts else self.allowed_hosts
        return (*_LOCAL_NAMES, self.host) if _is_loopback(self.host) else ()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
