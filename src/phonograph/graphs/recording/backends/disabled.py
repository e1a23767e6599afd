"""disabled: nothing is recorded; the body runs eagerly, through the registry and with a counted reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phonograph.devices import Device, MemoryPool
from phonograph.errors import CaptureError
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends.base import (
    BackendOptions,
    Bind,
    Body,
    Recording,
    ViewBody,
    Views,
    WarmUp,
    as_it_is,
)


class DisabledBackend:
    """Warms the body up and refuses to record it."""

    name = "disabled"
    is_exact = True
    records_body = True
    notes: Sequence[str] = ()

    def __init__(self, device: Device, pool: MemoryPool, options: BackendOptions = BackendOptions()) -> None:
        pass

    def prepare(self, body: ViewBody, views: Views, progress: Progress = silent) -> Bind:
        return as_it_is(body)

    def program_of(self, key: ShapeKey) -> int:
        return -1

    def rounds_in(self, key: ShapeKey) -> None:
        return None

    def warm_up(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        return body()

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        raise CaptureError("the backend is disabled", "Choose full or breakable", shape=str(key))
