"""debug: the capture path of another backend, with the body run eagerly in the place of every replay."""

from __future__ import annotations

from typing import Any

from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.recording.backends.base import Backend, Body, Recording, WarmUp


class DebugBackend:
    """Everything that a replay does, without a graph: a debugger and print work inside."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = inner.name

    def prepare(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        return self._inner.prepare(key, body, warm_up)

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        outputs = body()

        def run_again() -> None:
            body()

        return Recording([run_again], outputs, has_gaps=True)
