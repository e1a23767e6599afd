"""Current run: what is recorded or run right now, and for which batch. The one ambient value of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol


class Stage(Enum):
    """Why code runs now."""

    WARMING = "warming"
    CAPTURING = "capturing"
    REPLAYING = "replaying"
    EAGER = "eager"


class Breaker(Protocol):
    """Runs a call eagerly between two graphs of the recording that is being made."""

    def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Current:
    """What `current()` returns. Outside every runner: no phase, no backend, eager."""

    phase: str | None = None
    backend: str | None = None
    stage: Stage = Stage.EAGER
    batch: Any = None
    """The live batch: in a gap or a tail, the one that is served now, without its padding."""
    breaker: Breaker | None = None
    """Where `@graph_break` breaks; None where there is nothing to break."""
    around_gap: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around every gap."""


_OUTSIDE = Current()
_current: ContextVar[Current] = ContextVar("phonograph_current", default=_OUTSIDE)


def current() -> Current:
    """What runs right now: phase, backend, stage and the live batch."""
    return _current.get()


@contextmanager
def entering(now: Current) -> Iterator[None]:
    """Make `now` current; what was current is restored, also after an exception."""
    token = _current.set(now)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def unbroken() -> Iterator[None]:
    """Inside a gap nothing is recorded, so there is nothing to break."""
    now = _current.get()
    with entering(replace(now, breaker=None)), now.around_gap():
        yield
