"""Backend protocol: makes recordings of a body that takes a view; independent of runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch

from phonograph.devices import DeviceGraph
from phonograph.errors import Frame
from phonograph.graphs.inputs.fields import Path
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.weight_caches import weights_uncached

Body = Callable[[], Any]
ReplayStep = Callable[[], None]
ViewBody = Callable[[Any, Mapping[str, Any]], Any]
"""Takes the batch and the keyword arguments of a view."""


@dataclass(frozen=True)
class SizedAxis:
    """An axis of a view's tensor, and the dim that it is."""

    tensor: torch.Tensor
    axis: int
    dim: str


@dataclass(frozen=True)
class BodyView:
    """What a body is called with for one shape: views of the slots' buffers."""

    key: ShapeKey
    batch: Any
    kwargs: Mapping[str, Any]
    sizes: Sequence[SizedAxis] = ()
    """The axes whose size differs between recordings of the group."""
    size_fields: Sequence[Path] = ()
    """The fields of the batch, or keyword arguments, that are such a size."""


Views = Mapping[ShapeKey, Callable[[], AbstractContextManager[BodyView]]]
"""The views of a phase, largest first. Inside, one is loaded, and Python values are those of its shape."""
Bind = Callable[[BodyView], Body]
"""Takes a view; the body on it, to be run any number of times. Called where no op is watched."""


@dataclass(frozen=True)
class RecordedGap:
    """A gap of a recording: the function called, and the tensors that the graphs around it write and read."""

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
    """Tensors that the graphs read and that nothing else may keep alive."""
    made: Callable[[Any], Body] | None = None
    """Takes a loaded view: what was recorded in the place of the body, on it. None where the body was recorded."""
    replay: ReplayStep = field(init=False)

    def __post_init__(self) -> None:
        self.replay = self.steps[0] if len(self.steps) == 1 else _all(self.steps)

    @contextmanager
    def replaying(self, replay: Callable[[Sequence[ReplayStep]], None]) -> Iterator[None]:
        """Inside, a function that gets the steps replaces the replay."""
        usual, self.replay = self.replay, lambda: replay(self.steps)
        try:
            yield
        finally:
            self.replay = usual

    def release(self) -> None:
        """Free the graphs; the recording can't be replayed any more."""
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
    """Nothing is refused: libraries allocate their workspaces."""
    REHEARSAL = "rehearsal"
    """What capture would refuse raises already, by the cheapest check that the device has."""
    DIAGNOSIS = "diagnosis"
    """The same, with every op watched, so that the error names op and line."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of a plan and a phase for a backend."""

    compiler: str = "eager"
    """What compiles the pieces of a traced body."""
    fallback: bool = False
    """Whether a body that can't be traced is recorded as it is."""
    break_ops: frozenset[str] = frozenset()
    """Ops of a traced body that break it too, by name."""


class Backend(Protocol):
    """How a phase is recorded."""

    @property
    def name(self) -> str: ...

    @property
    def is_exact(self) -> bool:
        """Whether replays compute, bit by bit, what the body does on the same view."""
        ...

    @property
    def records_body(self) -> bool:
        """Whether a capture runs the body itself, in Python, and not what was made of it."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes on what was compiled or recorded, for `explain`."""
        ...

    def prepare(self, body: ViewBody, views: Views, progress: Progress = silent) -> Bind:
        """Once per phase, after free runs of the body itself: make of it what rehearsals and captures run.

        What can't be made for a view is raised when that is bound.
        """
        ...

    def program_of(self, key: ShapeKey) -> int:
        """Which of the programs that were made of the body a prepared shape runs; -1 where it is the body itself."""
        ...

    def rounds_in(self, key: ShapeKey) -> torch.dtype | None:
        """The coarsest dtype in which replays of a shape round otherwise than the body; None where none does."""
        ...

    def warm_up(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        """Run a body once as a warm-up and return what it returned: the body itself, or one that was bound."""
        ...

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        """Record a body; every key of the phase was prepared and warmed before."""
        ...


def as_it_is(body: ViewBody) -> Bind:
    """The body itself: what `prepare` returns where that is recorded."""

    def run(view: BodyView) -> Any:
        with weights_uncached():
            return body(view.batch, view.kwargs)

    return lambda view: partial(run, view)
