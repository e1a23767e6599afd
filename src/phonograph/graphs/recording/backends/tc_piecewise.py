"""tc_piecewise: the body traced by torch.compile, cut at its breaks, its pieces compiled and recorded.

It is the breakable backend with another body: free runs use the original body, so that Python reads and changes are
found as for the other backends; rehearsals and captures run the pieces. A replay never enters torch.compile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phonograph.devices import Device, MemoryPool
from phonograph.errors import CaptureError, DeclarationError
from phonograph.graphs.inputs.tree import TreePath, map_leaves
from phonograph.graphs.phases.context import Current, Stage, current, entering, tracing
from phonograph.graphs.phases.decisions import RecordingGroup, ShapeKey
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends.base import (
    BackendOptions,
    Bind,
    Body,
    BodyView,
    Recording,
    ViewBody,
    Views,
    WarmUp,
    as_it_is,
)
from phonograph.graphs.recording.backends.breakable import BreakableBackend
from phonograph.graphs.recording.backends.compilers import COMPILERS
from phonograph.graphs.recording.backends.pieces import Program, program_of
from phonograph.graphs.recording.backends.traced import Call, OtherValueError, TracedGraph, Tracer
from phonograph.graphs.recording.weight_caches import weights_uncached

log = logging.getLogger("phonograph")

MAX_PROGRAMS = 4
"""Programs that a group of recordings may need, where sizes decide what runs."""


@dataclass(frozen=True)
class PieceBody:
    """The program of a view's size, on the view's memory."""

    call: Call
    sizes: Mapping[Any, int]
    as_written: Body
    """The body itself on the same view."""
    checks: bool = False

    def __call__(self) -> Any:
        with weights_uncached(), torch.no_grad():
            outputs = self.call.program.run(self.call.flat, self.sizes, checks=self.checks)
        by_stand_in = {id(one): found for one, found in zip(self.call.stand_ins, outputs, strict=True)}

        def put(path: TreePath, leaf: Any) -> Any:
            return by_stand_in.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

        return map_leaves(self.call.result, put)


@dataclass(eq=False)
class _Programs:
    """The compiled programs of one group of recordings: one, unless the trace specializes on sizes or other values."""

    body: ViewBody
    make: Callable[[TracedGraph], Program]
    tracers: list[Tracer] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    """Why there is more than one."""
    _of_key: dict[ShapeKey, Tracer] = field(default_factory=dict)

    def call(self, view: BodyView, now: Current, *, may_add: bool) -> Call:
        """The call of a program that is for this view."""
        problem = other = ""
        known = self._of_key.get(view.key)
        with tracing(now):
            for tracer in self.tracers if known is None else (known,):
                try:
                    call = tracer.call(view)
                except OtherValueError as error:
                    other = other or tracer.program.graph.fixed(view) or error.problem
                    continue
                misfit = call.program.graph.misfit(call.flat)
                if not misfit:
                    self._of_key[view.key] = tracer
                    return call
                problem = problem or misfit
            return self._added(view, problem or other, may_add=may_add)

    def index_of(self, key: ShapeKey) -> int:
        """Which of the programs a shape runs; -1 for one that has none."""
        return self.tracers.index(self._of_key[key]) if key in self._of_key else -1

    def _added(self, view: BodyView, problem: str, *, may_add: bool) -> Call:
        if not may_add or len(self.tracers) >= MAX_PROGRAMS:
            count = f"{len(self.tracers)} programs were compiled for other sizes and values"
            raise CaptureError(
                f"{count}, and none is for this one: {problem}",
                "Compute the same for every size, use fewer buckets, or use backend='breakable'",
            )
        # Code that is general in a size fits others than one; inductor can't make such code from a size of one.
        is_general = not self.tracers or any(sized.tensor.shape[sized.axis] > 1 for sized in view.sizes)
        tracer = Tracer(self.body, self.make, is_general=is_general)
        call = tracer.call(view)
        self.tracers.append(tracer)
        self._of_key[view.key] = tracer
        if problem:
            self.misfits.append(f"{view.key}: {problem}")
        return call


class TcPiecewiseBackend:
    """Records graphs of compiled pieces between breaks."""

    name = "tc_piecewise"
    records_body = False

    def __init__(self, device: Device, pool: MemoryPool, options: BackendOptions = BackendOptions()) -> None:
        if options.compiler not in device.capabilities.compilers:
            raise DeclarationError(
                f"tc_piecewise on {device.name}: it can't record what {options.compiler} compiles. "
                f"Choose one of {', '.join(sorted(device.capabilities.compilers)) or 'no compiler: another backend'}."
            )
        self._options = options
        self._pieces = BreakableBackend(device, pool)
        # A separate backend: gaps noted in a run of the original body are not those of the pieces.
        self._as_written = BreakableBackend(device, pool)
        self._owners: dict[int, Any] = {}
        self._programs: dict[RecordingGroup, _Programs] = {}
        self._errors: dict[ShapeKey, CaptureError] = {}
        self._fallen_back: dict[ShapeKey, CaptureError] = {}
        self._rehearsed: set[ShapeKey] = set()
        """Shapes that are recorded as pieces."""
        self._progress: Progress = silent
        self.seconds = 0.0
        """Seconds of tracing and compiling."""
        self.compile_seconds = 0.0
        """Seconds of these in compilers; the rest is tracing."""

    @property
    def is_exact(self) -> bool:
        return self._options.compiler == "eager"

    @property
    def num_programs(self) -> int:
        """How often the body was compiled."""
        return len(self.programs)

    @property
    def programs(self) -> list[Program]:
        """The programs that run in place of the body."""
        return [tracer.program for group in self._programs.values() for tracer in group.tracers]

    @property
    def notes(self) -> Sequence[str]:
        if not self._programs:
            return ()
        programs = self.programs
        pieces, breaks = sum(len(one.pieces) for one in programs), sum(one.num_breaks for one in programs)
        made = f"{len(programs)} programs of {pieces} pieces, cut at {breaks} breaks"
        different = sum(one.num_compiled for one in programs)
        took = f"in {self.seconds:.2f} s ({self.seconds - self.compile_seconds:.2f} s of these to trace)"
        said = [f"compiled by {self._options.compiler} {took}: {made}; {different} pieces differ"]
        said += [f"a program of its own for {text}" for group in self._programs.values() for text in group.misfits]
        return said + [f"{key} is recorded as breakable does: {error}" for key, error in self._fallen_back.items()]

    def prepare(self, body: ViewBody, views: Views, progress: Progress = silent) -> Bind:
        start, self._programs, plain = time.perf_counter(), {}, as_it_is(body)
        self._errors, self._fallen_back, self._rehearsed = {}, {}, set()
        self._progress, self.compile_seconds = progress, 0.0
        for index, (key, loaded) in enumerate(views.items()):
            try:
                with loaded() as view:
                    self._group(body, key).call(view, self._now(view), may_add=True)
            except CaptureError as error:
                (self._fallen_back if self._options.fallback else self._errors)[key] = error
                if self._options.fallback:
                    log.warning("%s is recorded as breakable does: %s", key, error)
            progress(f"compiling {key}", index + 1, len(views))
        self.seconds = time.perf_counter() - start

        def bind(view: BodyView) -> Body:
            if view.key in self._errors:
                error = self._errors[view.key]
                raise CaptureError(error.problem, error.remedy, frame=error.frame)
            if view.key in self._fallen_back:
                return plain(view)
            call = self._programs[view.key.group].call(view, self._now(view), may_add=False)
            return PieceBody(call, call.program.graph.sizes(call.flat), plain(view))

        return bind

    def program_of(self, key: ShapeKey) -> int:
        group = self._programs.get(key.group)
        return group.index_of(key) if group is not None else -1

    def rounds_in(self, key: ShapeKey) -> torch.dtype | None:
        at = -1 if self.is_exact else self.program_of(key)
        return self._programs[key.group].tracers[at].program.graph.coarsest if at >= 0 else None

    def warm_up(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        if not isinstance(body, PieceBody):
            return self._run_as_written(key, body, warm_up)
        if warm_up is WarmUp.DIAGNOSIS:  # lines of the body are the user's; what pieces alone do is refused after it
            self._as_written.warm_up(key, body.as_written, warm_up)
        checked = replace(body, checks=True)
        self._rehearsed.add(key)
        try:
            return self._pieces.warm_up(key, checked, warm_up)
        except CaptureError:
            self._as_written.warm_up(key, body.as_written, warm_up)  # says the same, with the user's line
            raise

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        backend = self._pieces if key in self._rehearsed else self._as_written
        return backend.capture(key, body)

    def _run_as_written(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        """Notes whose methods gaps are."""
        now = current()
        on_gap = now.on_gap

        def note(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            owner = getattr(function, "__self__", None)
            if owner is not None:
                self._owners[id(owner)] = owner
            if on_gap is not None:
                on_gap(function, args, kwargs, result)

        with entering(replace(now, on_gap=note)):
            return self._as_written.warm_up(key, body, warm_up)

    def _group(self, body: ViewBody, key: ShapeKey) -> _Programs:
        if key.group not in self._programs:
            self._programs[key.group] = _Programs(body, self._made)
        return self._programs[key.group]

    def _made(self, graph: TracedGraph) -> Program:
        def tell(done: int, total: int) -> None:
            self._progress(f"compiling {current().phase}: parts", done, total)

        start, compile_piece = time.perf_counter(), COMPILERS[self._options.compiler]
        try:
            return program_of(graph, self._options.break_ops, self._owners, compile_piece, tell)
        finally:
            self.compile_seconds += time.perf_counter() - start

    def _now(self, view: BodyView) -> Current:
        return Current(view.key.phase, self.name, Stage.COMPILING, view.batch)
