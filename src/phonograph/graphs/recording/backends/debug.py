"""debug: the capture path of another backend, with the body run eagerly in the place of every replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends.base import (
    Backend,
    Bind,
    Body,
    Recording,
    ViewBody,
    Views,
    WarmUp,
    as_it_is,
)


class DebugBackend:
    """Everything that a replay does, without a graph: a debugger and print work inside."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = inner.name

    is_exact = True
    records_body = True

    @property
    def notes(self) -> Sequence[str]:
        return self._inner.notes

    def prepare(self, body: ViewBody, views: Views, progress: Progress = silent) -> Bind:
        return as_it_is(body)

    def program_of(self, key: ShapeKey) -> int:
        return -1

    def rounds_in(self, key: ShapeKey) -> None:
        return None

    def warm_up(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        return self._inner.warm_up(key, body, warm_up)

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        outputs = body()

        def run_again() -> None:
            body()

        return Recording([run_again], outputs, has_gaps=True)
