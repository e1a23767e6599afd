"""Current run: the phase, backend, stage and batch of the code that runs. The one ambient value of the package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch

from phonograph.devices.refused import Refused

BREAKING = frozenset({"breakable", "tc_piecewise"})
"""The backends whose recordings have gaps."""


class Stage(Enum):
    """Why the code runs."""

    COMPILING = "compiling"
    """torch.compile traces the code, and nothing is computed."""
    WARMING = "warming"
    CAPTURING = "capturing"
    REPLAYING = "replaying"
    EAGER = "eager"


class Breaker(Protocol):
    """Runs a call eagerly between two graphs of the recording that is being made."""

    def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


OnGap = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]
"""Takes the function of a gap, its arguments, and its result."""


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
    on_gap: OnGap | None = None
    """Told of every gap of a warm-up once it has run."""
    refused: Refused | None = None
    """Where a body is run to be recorded: what marks and live arguments refuse in it."""


_OUTSIDE = Current()
_current: ContextVar[Current] = ContextVar("phonograph_current", default=_OUTSIDE)


@dataclass
class _Tracing:
    """The current run as traced code sees it: Dynamo can't read a context variable."""

    now: Current | None = None


_tracing = _Tracing()
_one_trace = threading.RLock()


def current() -> Current:
    """The current run: phase, backend, stage and the live batch."""
    if torch.compiler.is_dynamo_compiling():  # False for all code that runs for real, on every thread
        traced = _tracing.now
        if traced is not None:
            return traced
    return _current.get()


def is_traced() -> bool:
    """Whether `tc_piecewise` is tracing the code."""
    return torch.compiler.is_dynamo_compiling() and _tracing.now is not None


@contextmanager
def tracing(now: Current) -> Iterator[None]:
    """Inside, traced code sees `now` as the current run."""
    with _one_trace, entering(now):
        before, _tracing.now = _tracing.now, now
        try:
            yield
        finally:
            _tracing.now = before


@contextmanager
def entering(now: Current) -> Iterator[None]:
    """Make `now` the current run; the previous one is restored, also after an exception."""
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
