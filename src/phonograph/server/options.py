"""What a server keeps to: names, limits, times and keys."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.errors import PlanError


@dataclass(frozen=True)
class ServerOptions:
    """The settings of the HTTP side; those of the engine are in its spec. A field's text is its flag's help."""

    host: str = "127.0.0.1"
    """where to listen; 0.0.0.0 lets other machines in: then set an API key"""
    port: int = 8000
    """where to listen; 0 takes a free one"""
    names: tuple[str, ...] = ()
    """what the model is called in requests; may be repeated (default: the name of its file or folder)"""
    api_keys: tuple[str, ...] = ()
    """keys of which a request must carry one"""
    max_queue: int = 1024
    """sequences that may wait for a place; with more, requests get a 429"""
    max_body_bytes: int = 8 << 20
    """the largest body of a request; a larger one gets a 413"""
    body_timeout: float = 30.0
    """seconds in which a request's body must arrive; else a 408"""
    request_timeout: float | None = None
    """seconds in which a request must be finished; else a 504, or an error event in a stream (default: no limit)"""
    stall_timeout: float = 60.0
    """seconds for which a client may read nothing of what was sent; then its connection is dropped"""
    drain_timeout: float = 30.0
    """seconds that running requests have to finish after SIGTERM or SIGINT"""
    log_prompts: bool = False
    """write prompts and answers to the log"""

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_queue", 0), ("max_body_bytes", 1)):
            value = getattr(self, name)
            if value < least:
                raise PlanError(f"server options: {name} must be at least {least}, found {value}.")
        for name in ("body_timeout", "request_timeout", "stall_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"server options: {name} must be above 0 seconds, found {value}.")
        if self.port > 65535:
            raise PlanError(f"server options: port must be at most 65535, found {self.port}.")
        if not all(self.api_keys):
            raise PlanError("server options: an API key is empty. Write one, or give none.")
