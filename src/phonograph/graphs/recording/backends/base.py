"""Backend protocol: makes a recording of a zero-argument body, and knows neither runner nor batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from phonograph.devices import DeviceGraph
from phonograph.errors import Frame
from phonograph.graphs.phases.decisions import ShapeKey

Body = Callable[[], Any]
ReplayStep = Callable[[], None]


@dataclass(frozen=True)
class RecordedGap:
    """A gap of a recording: whose call it is, and where the graphs around it leave and find their values."""

    function: Callable[..., Any]
    name: str
    called: Frame | None
    """The user's line that calls it; None for a call in our own code."""
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    """What it is called with, now."""
    outputs: Any
    """Where the next graph reads what it returned."""


@dataclass(eq=False)
class Recording:
    """What a backend made of one shape: graphs and gaps in order, and the outputs they write."""

    steps: Sequence[ReplayStep]
    outputs: Any
    graphs: Sequence[DeviceGraph] = ()
    has_gaps: bool = False
    gaps: Sequence[RecordedGap] = ()
    """In order; graphs and gaps take turns among the steps where there are some."""
    holds: Sequence[Any] = ()
    """What the graphs read and perhaps nothing else keeps alive."""
    replay: ReplayStep = field(init=False)

    def __post_init__(self) -> None:
        self.replay = self.steps[0] if len(self.steps) == 1 else _all(self.steps)

    @contextmanager
    def replaying(self, replay: Callable[[Sequence[ReplayStep]], None]) -> Iterator[None]:
        """Inside, a replay is left to a function, which gets the steps."""
        usual, self.replay = self.replay, lambda: replay(self.steps)
        try:
            yield
        finally:
            self.replay = usual

    def release(self) -> None:
        """Give the graphs back; the recording can't be replayed any more."""
        for graph in self.graphs:
            graph.release()


def _all(steps: Sequence[ReplayStep]) -> ReplayStep:
    # No method of the recording: that would hold the recording, and its graphs, until a garbage collection.
    def replay() -> None:
        for step in steps:
            step()

    return replay


class WarmUp(Enum):
    """How a body is run before it is captured."""

    FREE = "free"
    """Anything goes: libraries make their workspaces."""
    REHEARSAL = "rehearsal"
    """What capture would refuse raises now, as cheaply as the device can tell."""
    DIAGNOSIS = "diagnosis"
    """The same, with every op watched, so that the error names op and line."""


class Backend(Protocol):
    """How a phase is recorded."""

    @property
    def name(self) -> str: ...

    def prepare(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        """Run the body once as a warm-up and return what it returned."""
        ...

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        """Record the body; `prepare` has run for every key of the phase before."""
        ...
