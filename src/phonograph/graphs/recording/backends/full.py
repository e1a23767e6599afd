"""full: one graph per shape."""

from __future__ import annotations

from typing import Any

from phonograph.devices import Device, MemoryPool
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.recording.backends.base import Body, Recording, WarmUp


class FullBackend:
    """Records the whole body as one graph; breaks inside it are inert."""

    name = "full"

    def __init__(self, device: Device, pool: MemoryPool) -> None:
        self._device = device
        self._pool = pool

    def prepare(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        with self._device.rehearsal(named=warm_up is WarmUp.DIAGNOSIS) as rehearsal:
            if warm_up is WarmUp.FREE:
                return body()
            rehearsal.begin()
            outputs = body()
            rehearsal.end()
        return outputs

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        with self._device.recorder(self._pool) as recorder:
            recorder.begin()
            outputs = body()
            graph = recorder.end()
        return Recording([graph.replay], outputs, [graph])
