"""full: one graph per shape."""

from __future__ import annotations

from typing import Any

from phonograph.devices import Device, MemoryPool
from phonograph.graphs.backends.base import Body, Recording
from phonograph.graphs.decisions import ShapeKey


class FullBackend:
    """Records the whole body as one graph; breaks inside it are inert."""

    name = "full"

    def __init__(self, device: Device, pool: MemoryPool) -> None:
        self._device = device
        self._pool = pool

    def prepare(self, key: ShapeKey, body: Body, *, rehearse: bool) -> Any:
        with self._device.rehearsal() as rehearsal:
            if rehearse:
                rehearsal.begin()
            outputs = body()
            if rehearse:
                rehearsal.end()
        return outputs

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        with self._device.recorder(self._pool) as recorder:
            recorder.begin()
            outputs = body()
            graph = recorder.end()
        return Recording([graph.replay], outputs, [graph])
