"""Guard on demand: whether the ops of a runner's shapes depend on their samples, and what a shape runs.

Capture looks at the shapes that it records by itself; this looks again, at any of them, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phonograph.devices import MemoryPool
from phonograph.devices.nodes import (
    NodeDifference,
    NodeList,
    joined,
    keeping_nodes,
    node_counter,
    node_difference,
    nodes_of,
    steady,
)
from phonograph.devices.op_trace import OpTrace
from phonograph.errors import VerifyError
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends import BACKENDS, Backend, Recording, WarmUp
from phonograph.graphs.recording.frozen_values import Difference
from phonograph.graphs.recording.garbage import gc_frozen
from phonograph.graphs.recording.guarding import (
    Drawn,
    Finding,
    Guard,
    GuardedSizes,
    GuardOptions,
    drawn_for,
    following,
    guarded,
)
from phonograph.graphs.recording.memory_names import names_of_memory
from phonograph.graphs.recording.python_state import PythonState
from phonograph.graphs.recording.tensor_state import SavedState, generators_restored
from phonograph.graphs.recording.weight_caches import weights_uncached
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.running.runner_options import backend_options

_MAX_STATE_BYTES = 1 << 30


@dataclass(frozen=True)
class GuardReport:
    """What was looked at, and what differs."""

    keys: tuple[ShapeKey, ...]
    findings: tuple[Finding, ...]
    failures: tuple[str, ...] = ()
    """Shapes that could not be looked at, and why."""
    unseen: tuple[str, ...] = ()
    """What could not be read of the nodes of graphs."""

    @property
    def ok(self) -> bool:
        return not self.findings and not self.failures

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> None:
        """Raise with all that was found."""
        if not self.ok:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        found = len(self.findings) + len(self.failures)
        lines = [f"guard: {len(self.keys)} shapes run on several samples, {found} that differ or fail"]
        lines += [f"  {one}" for one in (*self.findings, *self.failures)]
        return "\n".join([*lines, *(f"  note: {one}" for one in self.unseen)])


def guard(
    runner: Runner,
    *,
    sizes: GuardedSizes = "all",
    keys: Sequence[ShapeKey] | None = None,
    nodes: bool = False,
    progress: Progress = silent,
) -> GuardReport:
    """Run every recorded shape of a runner on different samples, and compare ops, scalars and memory.

    Of all products the shapes of the given sizes, or just the given keys. With `nodes`, each is also recorded twice,
    into memory of its own, and the graphs are compared node by node, as far as the device tells them: of
    `tc_piecewise`, those of the body as it is written. What the body writes is put back.
    """
    asked = guarded(keys if keys is not None else runner.captured, sizes)
    runs = _Runs(runner)
    looking = Guard(runner.phase, runs.trace, runner.registry.measure)
    failures: dict[ShapeKey, str] = {}
    unseen: dict[str, None] = {}

    def attempt(key: ShapeKey, step: Callable[[ShapeKey], None]) -> None:
        if key not in failures:
            try:
                step(key)
            except Exception as error:
                failures[key] = f"{key}: {type(error).__name__}: {error}"

    def compare_nodes(key: ShapeKey) -> None:
        try:
            difference, not_read = runs.node_difference(key)
        except torch.OutOfMemoryError:
            difference, not_read = None, (f"the nodes of {key}: there is no memory to record it again",)
        unseen.update(dict.fromkeys(not_read))
        if difference is not None:
            looking.findings.append(Finding(key, difference))

    trims = runner.buckets is not None and not runner.buckets.exact
    busy = runner.pool.using(f"guarding {runner.phase.name}")
    with torch.no_grad(), gc_frozen(collect=not nodes), busy, runs.restored():
        looking.look(asked, GuardOptions(), attempt, trims=trims)
        known = {finding.key for finding in looking.findings}
        for index, key in enumerate(asked if nodes else ()):
            progress(f"guarding {runner.phase.name}", index, len(asked))
            if key not in known:
                attempt(key, compare_nodes)
        progress(f"guarding {runner.phase.name}", len(asked), len(asked))
    if nodes and asked and not runner.backend.records_body:
        unseen[f"what {runner.plan.backend} made of the body: the nodes are those of the body as it is written"] = None
    return GuardReport(tuple(asked), tuple(looking.findings), tuple(failures.values()), tuple(unseen))


@dataclass(frozen=True)
class BodyTrace:
    """What one shape runs, op by op."""

    key: ShapeKey
    trace: OpTrace
    names: dict[int, str]
    """By number of its memory, what the user calls it."""

    def __str__(self) -> str:
        lines = [f"{self.key}: {len(self.trace.ops)} ops"]
        met: set[int] = set()
        for op in self.trace.ops:
            frame = f"  ({op.frame})" if op.frame is not None else ""
            numbers = {note.memory for _, note in op.arguments if hasattr(note, "memory")}
            read = sorted(self.names[number] for number in numbers - met if number in self.names)
            met |= numbers
            lines.append(f"  {op}{frame}{'  reads ' + ', '.join(read) if read else ''}")
        return "\n".join(lines)


def traced(runner: Runner, key: ShapeKey) -> BodyTrace:
    """The ops of one shape with their lines, and the memory that they read by name."""
    runs, drawn, trace = _Runs(runner), drawn_for(runner.phase, key), OpTrace()
    with torch.no_grad(), runner.pool.using(f"tracing {runner.phase.name}"), runs.restored():
        runs.trace(key, drawn, trace)
    names = names_of_memory(runner.phase.code, [drawn.sample.batch, drawn.sample.kwargs])
    names |= runs.slots
    found = {number: names.get(outside.storage._cdata) for number, outside in trace.outside.items()}
    return BodyTrace(key, trace, {number: name for number, name in found.items() if name is not None})


@dataclass(eq=False)
class _Runs:
    """Rehearsals of a runner's body, whose effects are undone."""

    runner: Runner
    slots: dict[int, str] = field(default_factory=dict)
    """By storage, the slots whose buffer it is."""
    _state: SavedState = field(default_factory=lambda: SavedState(_MAX_STATE_BYTES))
    _python: PythonState | None = None
    _backend: Backend = field(init=False)

    def __post_init__(self) -> None:
        # One of its own: what a rehearsal of gaps notes is not for the backend that serves.
        self._backend = self._new_backend(self.runner.memory)
        if self.runner.phase.preserve is None:
            self._python = PythonState(self.runner.phase.code)

    def _new_backend(self, memory: MemoryPool) -> Backend:
        options = backend_options(self.runner.options, self.runner.phase)
        return BACKENDS[self.runner.plan.backend](self.runner.device, memory, options)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with generators_restored(self.runner.device):
            try:
                yield
            finally:
                self._state.restore()

    def trace(self, key: ShapeKey, drawn: Drawn, trace: OpTrace) -> None:
        """One rehearsal on a sample, whose ops are noted."""
        with self._bound(drawn, Stage.WARMING) as (body, now), entering(following(trace, now)), trace.following():
            self._backend.warm_up(key, body, WarmUp.REHEARSAL)

    def node_difference(self, key: ShapeKey) -> tuple[Difference | None, tuple[str, ...]]:
        """How the graphs of two samples differ, and what could not be read of them."""
        # Kept to the end: no memory of one is given to another, whose address would then be the same.
        drawn = [drawn_for(self.runner.phase, key, seed) for seed in (0, 1)]
        recordings: list[Recording] = []

        def nodes(sample: int, trace: OpTrace | None = None) -> NodeList:
            recordings.append(self._recorded(key, drawn[sample], trace))
            return joined([nodes_of(graph) for graph in recordings[-1].graphs])

        try:
            one, other = nodes(0), nodes(1)
            found = node_difference(one, other)
            if found is not None:
                # In the other order: what merely alternates from capture to capture is no difference either.
                other, one = steady(other, nodes(1)), steady(one, nodes(0))
                found = node_difference(one, other)
            unseen = tuple(dict.fromkeys((*one.unseen, *other.unseen)))
            return (self._located(found, (one, other), nodes) if found is not None else None), unseen
        finally:
            for recording in recordings:
                recording.release()
            self.runner.device.free_unused()  # memory of its own, which no other recording takes

    def _located(
        self, found: NodeDifference, lists: tuple[NodeList, NodeList], nodes: Callable[[int, OpTrace], NodeList]
    ) -> Difference:
        """A difference with the op that recorded the node, or the nearest before it; records the shape once more."""
        unknown = Difference("", None, found.problem)
        trace, sample = OpTrace(num_nodes=node_counter(self.runner.device)), int(found.index >= len(lists[0].nodes))
        if trace.num_nodes is None:
            return unknown
        try:
            again = nodes(sample, trace).nodes[found.index]
        except Exception:  # no memory, or less than before: then without a line
            return unknown
        node, op = lists[sample].nodes[found.index], trace.op_before(found.index)
        if op is None or (node.kind, node.name) != (again.kind, again.name):
            return unknown
        return Difference(op.name, op.frame, f"{found.problem}, recorded by {op.name} or after it")

    def _recorded(self, key: ShapeKey, drawn: Drawn, trace: OpTrace | None) -> Recording:
        """A recording from a sample, in memory of its own: what it overlays is nobody else's."""
        device = self.runner.device
        backend = self._new_backend(device.new_pool())
        with self._bound(drawn, Stage.WARMING) as (body, now), entering(now):
            backend.warm_up(key, body, WarmUp.REHEARSAL)
        with self._bound(drawn, Stage.CAPTURING) as (body, now), keeping_nodes(device):
            with entering(replace(now, stage=Stage.WARMING)):
                # Once more after the load: addresses of the sample, left on the stack, are not in the capture's
                # parameters by accident.
                backend.warm_up(key, body, WarmUp.REHEARSAL)
            self._plan(now.batch, drawn)  # a plan is for one run
            current = now if trace is None else following(trace, now)
            with entering(current), trace.following() if trace is not None else nullcontext():
                return backend.capture(key, body)

    @contextmanager
    def _bound(self, drawn: Drawn, stage: Stage) -> Iterator[tuple[Callable[[], Any], Current]]:
        """The body on a loaded sample, from the state of the first run, and what is current while it runs."""
        phase, registry, sample = self.runner.phase, self.runner.registry, drawn.sample
        self._state.restore()
        with self._python.kept() if self._python is not None else nullcontext():
            view = registry.load(sample.batch, drawn.extent, kwargs=sample.kwargs, without=phase.without, anew=True)
            for name, tensor in phase.inputs(view.batch, view.kwargs, phase.without).items():
                self.slots.setdefault(tensor.untyped_storage()._cdata, f"slot {name}")
            self._plan(view.batch, drawn)

            def body() -> Any:
                with weights_uncached():
                    return phase.forward(view.batch, view.kwargs)

            watched = self._state.watching() if stage is Stage.WARMING else nullcontext()
            with phase.preserve(sample.batch) if phase.preserve is not None else watched:
                yield body, Current(phase.name, self._backend.name, stage, view.batch)

    def _plan(self, batch: Any, drawn: Drawn) -> None:
        host_plan = self.runner.phase.host_plan
        if host_plan is not None:
            host_plan(batch, drawn.extent)
