"""Binding: samples loaded into the buffers of a phase, and its body on their views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from phonograph.devices.refused import Refused
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.fields import fetch, path_of
from phonograph.graphs.inputs.registry import LoadMode, Registry, View
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.live_arguments import hidden
from phonograph.graphs.phases.phase import Phase, Sample
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends import Backend, Bind, Body, BodyView, SizedAxis
from phonograph.graphs.recording.bound import Bound, named_state
from phonograph.graphs.recording.guarding import Drawn, drawn_for
from phonograph.graphs.recording.tensor_state import SavedState
from phonograph.graphs.recording.weight_caches import weights_uncached

CAPTURE_SEED = 0
Noting = Callable[[Any], Any]
"""Makes a batch that notes what is read of it."""


@dataclass(frozen=True)
class MadeBodies:
    """What a backend made of a phase's body, for views of the phase's shapes."""

    phase: Phase
    bind: Bind
    varying: Mapping[ShapeKey, frozenset[str]]

    def of(self, key: ShapeKey, view: View) -> Body:
        """It on a view; called where no op is watched."""
        return self.bind(body_view(self.phase, key, view, self.varying[key]))


@dataclass(eq=False)
class Binder:
    """Binds the body of a phase: the body itself, and once it is prepared, what the backend made of it."""

    phase: Phase
    registry: Registry
    backend: Backend
    state: SavedState
    """State that trial runs have written: each run starts from the state before the first."""
    made: MadeBodies | None = None
    """Once it is prepared."""
    _views: list[View] = field(default_factory=list)

    def prepare(
        self,
        keys: Sequence[ShapeKey],
        kept: Callable[[ShapeKey], AbstractContextManager[None]],
        progress: Progress = silent,
    ) -> None:
        """From here on, the backend's own form of the body is bound; `kept` makes Python values those of a key."""
        varying = {key: self._dims_that_vary(key, keys) for key in keys}

        @contextmanager
        def loaded(key: ShapeKey) -> Iterator[BodyView]:
            with kept(key):
                drawn = drawn_for(self.phase, key, CAPTURE_SEED)
                yield body_view(self.phase, key, self.load(drawn.sample, drawn.extent), varying[key])

        bind = self.backend.prepare(self.phase.forward, {key: partial(loaded, key) for key in keys}, progress)
        self.made = MadeBodies(self.phase, bind, varying)

    def bound(
        self,
        key: ShapeKey,
        stage: Stage,
        drawn: Drawn | None = None,
        *,
        as_written: bool = False,
        noting: Noting | None = None,
    ) -> Bound:
        """The body on a sample for the key; `as_written`, the body itself, of whose batch reads can be noted."""
        drawn = drawn if drawn is not None else drawn_for(self.phase, key, CAPTURE_SEED)
        sample, extent = drawn.sample, drawn.extent
        view = self.load(sample, extent)
        if self.phase.host_plan is not None:
            self.phase.host_plan(view.batch, extent)
        refused = Refused()
        now = Current(self.phase.name, self.backend.name, stage, view.batch, refused=refused)
        inputs = self.phase.inputs(view.batch, view.kwargs, self.phase.without)
        made = None if as_written else self.made
        body = partial(self.forward, view, noting) if made is None else made.of(key, view)
        if made is None or self.backend.records_body:  # else it is the backend's own, which catches nothing
            body = partial(_insisting, body, refused)
        return Bound(body, now, sample.batch, inputs, view.kwargs)

    @contextmanager
    def trial(
        self, key: ShapeKey, drawn: Drawn | None = None, noting: Noting | None = None, *, as_written: bool = True
    ) -> Iterator[Bound]:
        """A body to run once, to see what it does; what it writes is put back."""
        bound = self.bound(key, Stage.WARMING, drawn, as_written=as_written, noting=noting)
        if self.phase.preserve is None:
            # Compiled code has memory of its own that no op makes; what the body writes was found in its own runs.
            is_seen = as_written or self.made is None or self.backend.is_exact
            with entering(bound.now), self.state.watching() if is_seen else nullcontext():
                yield bound
        else:
            with entering(bound.now), self.phase.preserve(bound.batch) as preserved:
                yield replace(bound, state=named_state(preserved))

    def forward(self, view: View, noting: Noting | None = None) -> Any:
        """The body itself on a view."""
        with weights_uncached():
            return self.phase.forward(view.batch, view.kwargs, noting)

    def load(self, sample: Sample, extent: Extent, mode: LoadMode = LoadMode.GRAPH) -> View:
        """New views for each run, which starts from the state of the first; kept alive, so that no id() is reused."""
        self.state.restore()
        without = self.phase.without
        view = self.registry.load(sample.batch, extent, mode=mode, kwargs=sample.kwargs, without=without, anew=True)
        self._views.append(view)
        return view

    def _dims_that_vary(self, key: ShapeKey, keys: Sequence[ShapeKey]) -> frozenset[str]:
        sizes = [self.phase.padded(one.size) for one in keys if one.group == key.group]
        return frozenset(name for name in sizes[0] if len({size[name] for size in sizes}) > 1)


def _insisting(body: Body, refused: Refused) -> Any:
    """Run a body, and raise what was refused in it, though it may have caught that."""
    with refused.insisted_on():
        return body()


def body_view(phase: Phase, key: ShapeKey, view: View, varying: frozenset[str]) -> BodyView:
    """A loaded view as backends take it; `varying` are the dims whose size differs between recordings of the group."""
    found: list[SizedAxis] = []
    for slot in phase.slots:
        tensor = fetch(view.batch, view.kwargs, slot.path) if slot.name not in phase.without else None
        if isinstance(tensor, torch.Tensor):
            found += [SizedAxis(tensor, axis, str(dim)) for axis, dim in enumerate(slot.shape) if dim in varying]
    batch = hidden(view.batch, phase.live) if phase.live else view.batch
    fields = {name: dim.field for name, dim in phase.all_dims.items() if dim.field is not None}
    return BodyView(
        key, batch, view.kwargs, found, [path_of(field) for name, field in fields.items() if name in varying]
    )
