"""full: one graph per shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phonograph.devices import Device, MemoryPool
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


class FullBackend:
    """Records the whole body as one graph; breaks inside it are inert."""

    name = "full"
    is_exact = True
    records_body = True
    notes: Sequence[str] = ()

    def __init__(self, device: Device, pool: MemoryPool, options: BackendOptions = BackendOptions()) -> None:
        self._device = device
        self._pool = pool

    def prepare(self, body: ViewBody, views: Views, progress: Progress = silent) -> Bind:
        return as_it_is(body)

    def program_of(self, key: ShapeKey) -> int:
        return -1

    def rounds_in(self, key: ShapeKey) -> None:
        return None

    def warm_up(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
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
