"""Backends: a table by name; a new one is a file here and a line in it."""

from __future__ import annotations

from collections.abc import Callable

from phonograph.devices import Device, MemoryPool
from phonograph.graphs.recording.backends.base import (
    Backend,
    BackendOptions,
    Bind,
    Body,
    BodyView,
    RecordedGap,
    Recording,
    SizedAxis,
    WarmUp,
)
from phonograph.graphs.recording.backends.breakable import BreakableBackend
from phonograph.graphs.recording.backends.debug import DebugBackend
from phonograph.graphs.recording.backends.disabled import DisabledBackend
from phonograph.graphs.recording.backends.full import FullBackend
from phonograph.graphs.recording.backends.tc_piecewise import TcPiecewiseBackend

BACKENDS: dict[str, Callable[[Device, MemoryPool, BackendOptions], Backend]] = {
    "full": FullBackend,
    "breakable": BreakableBackend,
    "tc_piecewise": TcPiecewiseBackend,
    "disabled": DisabledBackend,
}

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendOptions",
    "Bind",
    "Body",
    "BodyView",
    "DebugBackend",
    "RecordedGap",
    "Recording",
    "SizedAxis",
    "WarmUp",
]
