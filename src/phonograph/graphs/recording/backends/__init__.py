"""Backends: a table by name; a new one is a file here and a line in it."""

from __future__ import annotations

from collections.abc import Callable

from phonograph.devices import Device, MemoryPool
from phonograph.graphs.recording.backends.base import Backend, Body, RecordedGap, Recording, WarmUp
from phonograph.graphs.recording.backends.breakable import BreakableBackend
from phonograph.graphs.recording.backends.debug import DebugBackend
from phonograph.graphs.recording.backends.disabled import DisabledBackend
from phonograph.graphs.recording.backends.full import FullBackend

BACKENDS: dict[str, Callable[[Device, MemoryPool], Backend]] = {
    "full": FullBackend,
    "breakable": BreakableBackend,
    "disabled": DisabledBackend,
}

__all__ = ["BACKENDS", "Backend", "Body", "DebugBackend", "RecordedGap", "Recording", "WarmUp"]
