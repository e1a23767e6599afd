"""disabled: nothing is recorded; the body runs eagerly, through the registry and with a counted reason."""

from __future__ import annotations

from typing import Any

from phonograph.devices import Device, MemoryPool
from phonograph.errors import CaptureError
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.recording.backends.base import Body, Recording, WarmUp


class DisabledBackend:
    """Warms the body up and refuses to record it."""

    name = "disabled"

    def __init__(self, device: Device, pool: MemoryPool) -> None:
        pass

    def prepare(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        return body()

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        raise CaptureError("the backend is disabled", "Choose full or breakable", shape=str(key))
