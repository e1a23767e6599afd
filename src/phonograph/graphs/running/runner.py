"""Runner: decides, loads, replays and trims for one phase."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch

from phonograph.devices import Device, MemoryPool
from phonograph.errors import CoverageError, DeclarationError, LoadError, OutputError
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import Registry
from phonograph.graphs.inputs.tree import Keep, TreePath, leaves
from phonograph.graphs.phases.axes import PLAIN
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import Decision, Reason, RecordingGroup, Replay, RunEagerly, ShapeKey, Stats
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.phases.selection import Selection, select
from phonograph.graphs.planning.resolve import PhasePlan
from phonograph.graphs.progress import Progress, bar
from phonograph.graphs.recording.backends import BACKENDS, DebugBackend, Recording
from phonograph.graphs.recording.capture import Capture
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.recording.captured import Captured
from phonograph.graphs.recording.facts import WatchedFacts
from phonograph.graphs.recording.guarding import GuardOptions
from phonograph.graphs.recording.outputs import OutputBuffers, own, trim
from phonograph.graphs.recording.profiling import profiled
from phonograph.graphs.running.eager_pass import EagerOptions, eager_pass, kept_eagerly
from phonograph.graphs.running.entries import Loaded, RecordingEntry, Verified
from phonograph.graphs.running.explained import explained
from phonograph.graphs.running.routes import Routes
from phonograph.graphs.running.runner_options import RunnerOptions, backend_options, buckets_for
from phonograph.graphs.running.stale import StaleWatch

log = logging.getLogger("phonograph")

_NOTHING: Mapping[str, Any] = {}


class Runner:
    """Serves the batches of one phase by replay where a recording fits, and eagerly, with a reason, where none does."""

    def __init__(
        self,
        phase: Phase,
        device: Device,
        plan: PhasePlan,
        *,
        pool: BufferPool | None = None,
        memory: MemoryPool | None = None,
        options: RunnerOptions = RunnerOptions(),
    ) -> None:
        self.phase = phase
        self.device = device
        self.plan = plan
        self.options = options
        self.buckets = buckets_for(plan, phase.bucketed)
        self.pool = pool if pool is not None else BufferPool(device)
        self.memory = memory if memory is not None else self.pool.memory
        self.registry = Registry(device, phase.slots, phase.all_dims, owner=phase.name, adopt=phase.adopt)
        backend = BACKENDS[plan.backend](device, self.memory, backend_options(options, phase))
        self.backend = DebugBackend(backend) if options.debug else backend
        self.stats: Final = Stats()
        self.report: CaptureReport | None = None
        self.verified: Verified | None = None
        """How much of the current recordings was verified."""
        self.last: Decision | None = None
        """What the latest call ran."""
        self.output_buffers = OutputBuffers(device.torch_device)
        self._entries: dict[ShapeKey, RecordingEntry] = {}
        self._refused: dict[ShapeKey, RunEagerly] = {}
        """Keys that have no recording, and why."""
        self._limits = {name: dim.limit for name, dim in phase.all_dims.items() if dim.limit is not None}
        self.selection: Selection | None = None
        """The recordings that a capture makes; None where nothing is recorded."""
        self._routes: Routes | None = None
        self._loaded: Loaded | None = None
        self.stale = StaleWatch(phase, options)
        self._entry_now = Current(phase.name, plan.backend, Stage.REPLAYING)
        self._eager_options = EagerOptions(plan.backend, options.eager_copies)
        self._kept_eagerly = kept_eagerly(self.output_buffers, self.registry)
        if plan.backend != "disabled":
            if self.buckets is None:
                raise DeclarationError(f"phase {phase.name!r} has neither buckets nor a limit. Give one of them.")
            self.registry.declare(self.pool, phase.bucketed, self.buckets.largest)
            self.selection = select(phase, self.buckets, plan.max_recordings)
            self._routes = Routes(self.selection)
            self._route()

    # -- capture ------------------------------------------------------------------------------------------

    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Record every bucket; one that fails stays eager, says why, and leaves the others captured."""
        with self._using("capturing"), self._warmed(progress if progress is not None else bar(), nullcontext) as record:
            return record()

    def new_capture(self, progress: Progress) -> Capture:
        """A capture over this runner's parts."""
        return Capture(
            self.phase,
            self.device,
            self.registry,
            self.backend,
            self.output_buffers,
            progress,
            self.options.collect_garbage,
            self.options.barrier,
            trims=self.buckets is not None and not self.buckets.exact,
            facts=self.stale.recorder(self.selection),
            guard=GuardOptions(self.options.guard, self.options.guarded),
        )

    def refresh(self, progress: Progress | None = None) -> CaptureReport:
        """Record again if what the recordings assume has changed; the old ones are released first."""
        return self.report if self.report is not None and self.stale.find() is None else self.capture(progress)

    @property
    def facts(self) -> WatchedFacts:
        """What the recordings took for granted besides their slots."""
        return self.stale.facts

    @contextmanager
    def warmed(self, progress: Progress) -> Iterator[Callable[[], CaptureReport]]:
        """Release old recordings and warm up all shapes; the returned function records them.

        Several runners may be warmed before the first records: the device is busy with one while the host begins the
        next. What is raised meanwhile leaves none of them with recordings.
        """
        with self._warmed(progress, lambda: self._using("capturing")) as record:
            yield record

    def _using(self, doing: str) -> AbstractContextManager[None]:
        return self.pool.using(f"{doing} {self.phase.name}")

    @contextmanager
    def _warmed(
        self, progress: Progress, using: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[Callable[[], CaptureReport]]:
        """As `warmed`; `using` holds the pool while shapes are warmed, and again while they are recorded."""
        if self.selection is None:
            nothing = self.report = CaptureReport((), 0.0, 0.0)
            yield lambda: nothing
            return
        capture, keys = self.new_capture(progress), self.selection.keys

        def record() -> CaptureReport:
            with using(), profiled(self.options.profile, f"{self.phase.name}-capture"):
                return self._admit(capture.record(keys))

        with ExitStack() as stack:
            with using():
                self.pool.seal()
                self._release()
                with profiled(self.options.profile, f"{self.phase.name}-warm-up"):
                    stack.enter_context(capture.warmed(keys))
            yield record

    def _admit(self, captured: Captured) -> CaptureReport:
        report = self.report = replace(captured.report, left_out=self.selection.left_out if self.selection else ())
        for key, recording in captured.recordings.items():
            trimming, carried, counts = captured.trimmings[key.group], captured.carried[key], self.stats.recordings[key]
            padded, kept = self.phase.padded(key.size), self.output_buffers.standing.kept
            self._entries[key] = RecordingEntry(recording, padded, trimming, carried, kept, counts)
        self.stale.begin(captured.facts)
        for row in report.failures:
            self._refused[row.key] = RunEagerly(Reason.CAPTURE_FAILED, f"the capture of {row.key} failed")
        self._route()
        if report.left_out:
            missing = sum(one.num_recordings for one in report.left_out)
            log.warning("capturing %s: %d recordings left out: %s", self.phase.name, missing, report.left_out[0])
        if self.options.strict and report.failures:
            raise CoverageError(
                f"strict: {len(report.failures)} of {len(report.rows)} recordings failed; "
                f"the first: {report.failures[0].error}"
            )
        return report

    def release(self) -> None:
        """Free all graphs; calls are served eagerly until the next capture."""
        with self._using("releasing"):
            self._release()

    def _release(self) -> None:
        for entry in self._entries.values():
            entry.recording.release()
        self._entries.clear()
        self._refused.clear()
        self._loaded = None
        self.stale.begin(None)
        self.report = self.verified = None
        self._route()

    def mistrust(self, key: ShapeKey, why: str) -> None:
        """Release a recording that was found wrong; its batches are served eagerly until the next capture."""
        with self._using("giving back a recording of"):
            self._entries.pop(key).recording.release()
            self._refused[key] = RunEagerly(Reason.MISTRUSTED, f"{key} is not to be trusted: {why}")
            self._loaded = None
            self._route()

    def recording(self, key: ShapeKey) -> Recording:
        """The recording of a key that has one."""
        return self._entries[key].recording

    def carried(self, key: ShapeKey) -> Mapping[str, Any]:
        """Snapshots of what the sample of a recording had besides slots; a replay keeps these values."""
        return self._entries[key].carried

    def trimmed(self, key: ShapeKey, used: Mapping[str, int]) -> Any:
        """The used rows of a recording's outputs, as views."""
        return self._entries[key].fitted(used, self.registry, self.phase.without).outputs

    def tried(self, key: ShapeKey) -> Mapping[str, Sequence[int]]:
        """By dim with a limit, the sizes below it that the body ran at; where there are none, batches must fill it."""
        return self._entries[key].tried

    def trim(self, key: ShapeKey, outputs: Any, used: Mapping[str, int]) -> Any:
        """The used rows of outputs that the body gave for the key's padded view."""
        return trim(outputs, self._entries[key].axes, used, self.output_buffers.standing.kept)

    def parts(self, outputs: Any) -> dict[TreePath, Any]:
        """Copies of the tensors in a body's outputs, and its plain values, by path."""
        kept = self.output_buffers.standing.kept
        return dict(leaves(own(outputs, kept), kept))

    @property
    def standing_in(self) -> Mapping[ShapeKey, ShapeKey]:
        """By a key that has no recording of its own, the one whose recording serves its batches."""
        return self._routes.standing_in if self._routes is not None else {}

    @property
    def captured(self) -> tuple[ShapeKey, ...]:
        """The keys that have a recording."""
        return tuple(self._entries)

    # -- decide -------------------------------------------------------------------------------------------

    def decide(self, batch: Any, kwargs: Mapping[str, Any] = _NOTHING) -> Decision:
        """What `run` would do with this batch; changes nothing, and raises where `run` can't measure the batch."""
        with torch.no_grad():
            return self._decide(batch, kwargs, self.registry.measure(batch, kwargs))

    def _decide(self, batch: Any, kwargs: Mapping[str, Any], sizes: dict[str, int]) -> Decision:
        used = sizes[self.phase.bucketed]
        if self._routes is None:
            return self._disabled()
        route = self._routes.only or self._routes.of(batch, kwargs)
        if route is None:
            return self._routes.refusal(batch)
        if used >= len(route):
            return self._routes.too_large(used, len(route) - 1)
        decision = route[used]
        return (self._unfit(batch, kwargs, decision.key, sizes) if isinstance(decision, Replay) else None) or decision

    def decisions(self) -> Iterator[tuple[RecordingGroup, Callable[[int], Decision]]]:
        """For every product, what becomes of its batches by size, as far as size and product decide."""
        if self._routes is not None:
            yield from self._routes.each()
        else:
            yield (PLAIN, frozenset()), lambda used: self._disabled()

    def _disabled(self) -> RunEagerly:
        return RunEagerly(Reason.DISABLED, f"the backend of {self.phase.name} is disabled")

    def _unfit(self, batch: Any, kwargs: Mapping[str, Any], key: ShapeKey, sizes: dict[str, int]) -> RunEagerly | None:
        """Why the recording of its size can't serve a batch, or None if it can."""
        for name, limit in self._limits.items():
            if sizes[name] > limit:
                return RunEagerly(Reason.TOO_LARGE, f"{sizes[name]} {name}, graphs hold {limit}")
        entry = self._entries[key]
        if (changed := self.stale.of_batch(key, entry.carried, batch, kwargs)) is not None:
            return changed
        if unfilled := entry.unfilled(sizes):
            detail = f"{sizes[unfilled]} {unfilled}: the body could be tried with {self._limits[unfilled]} only"
            return RunEagerly(Reason.NOT_TRIMMED, detail)
        for admit in self.phase.admission:
            refusal = admit(batch, key)
            if refusal is not None:
                return refusal
        return self.stale.refusal() if self.stale.is_on else None

    def _route(self) -> None:
        if self._routes is not None:
            self._routes.settle(self.plan, self._entries, self._refused)

    # -- run ----------------------------------------------------------------------------------------------

    def run(self, batch: Any, **kwargs: Any) -> Any:
        """Serve one batch; gradients are off, whatever the caller's state."""
        if not torch.is_grad_enabled():
            return self._run(batch, kwargs)
        torch._C._set_grad_enabled(False)  # torch.no_grad() costs a tenth of a step's host time
        try:
            return self._run(batch, kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    def _run(self, batch: Any, kwargs: Mapping[str, Any]) -> Any:
        if not self.pool.in_use.acquire(blocking=False):
            raise self.pool.busy(f"running {self.phase.name}")
        try:
            used = self.registry.measure(batch, kwargs)
            decision = self.last = self._decide(batch, kwargs, used)
            if isinstance(decision, Replay):
                return self._replay(decision.key, batch, kwargs, used)
            return self._eager(decision, batch, kwargs, used)
        finally:
            self.pool.in_use.release()

    @property
    def can_repeat(self) -> bool:
        """Whether the buffers still hold the last batch, and its recording needs nothing else of it."""
        if self._loaded is None or self._loaded.num_loads != self.registry.num_loads:
            return False
        return not self.stale.is_on or self.stale.refusal() is None

    def repeat(self) -> Any:
        """Replay the last batch again without a load: one launch. For a body that advances its own state."""
        if not self.pool.in_use.acquire(blocking=False):
            raise self.pool.busy(f"repeating {self.phase.name}")
        try:
            loaded = self._loaded
            if loaded is None or loaded.num_loads != self.registry.num_loads:
                raise LoadError(
                    f"repeating {self.phase.name}: the buffers don't hold its last batch any more. "
                    "Ask can_repeat first, and call run() where it says no."
                )
            loaded.entry.recording.replay()
            loaded.entry.counts.add(loaded.used)
            return self._owned(loaded.outputs, self.output_buffers.standing.kept)
        finally:
            self.pool.in_use.release()

    def _replay(self, key: ShapeKey, batch: Any, kwargs: Mapping[str, Any], used: dict[str, int]) -> Any:
        entry, phase = self._entries[key], self.phase
        fitted = entry.fitted(used, self.registry, phase.without)
        extent, result = fitted.extent, fitted.outputs
        if phase.host_plan is None:
            self.registry.fill_prepared(batch, extent, kwargs, fitted.prepared)
        else:
            view = self.registry.load(batch, extent, kwargs=kwargs, without=phase.without)
            phase.host_plan(view.batch, extent)
        tail = phase.tail if not phase.tail_captured else None
        self._loaded = None
        if tail is None and not entry.recording.has_gaps:
            entry.recording.replay()
            if phase.host_plan is None:
                self._loaded = Loaded(key, entry, result, used[phase.bucketed], self.registry.num_loads)
        else:
            live = self.registry.live(batch, extent, kwargs=kwargs, without=phase.without)
            with entering(replace(self._entry_now, batch=live.batch)):
                entry.recording.replay()
                if tail is not None:
                    result = tail(result, live.batch)
        if self.options.debug:
            self.stats.count_eager(RunEagerly(Reason.DEBUG, f"the body runs in the place of {key}"), phase.name)
        else:
            entry.counts.add(used[phase.bucketed])
        return self._owned(result, self.output_buffers.standing.kept if tail is None else self._kept_eagerly)

    def _eager(self, decision: RunEagerly, batch: Any, kwargs: Mapping[str, Any], used: dict[str, int]) -> Any:
        if self.options.strict:
            problem = f"strict: {self.phase.name} has no graph for this batch: {decision.detail}."
            raise CoverageError(problem, reason=decision.reason.value)
        self._loaded = None
        result = eager_pass(self.phase, self.registry, batch, kwargs, used, self._eager_options)
        self.stats.count_eager(decision, self.phase.name)
        # An eager body may hand back an input or its own state, which the next call changes.
        return self._owned(result, self._kept_eagerly)

    def _owned(self, result: Any, kept: Keep) -> Any:
        """What a call returns: copies, unless views were asked for."""
        if self.options.outputs == "view":
            return result
        try:
            return own(result, kept)
        except OutputError as error:
            raise OutputError(f"running {self.phase.name}: {error.problem}", error.remedy) from None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"copying or pickling the runner of {self.phase.name}: graphs and their buffers stay where they were made. "
            "Copy what they were made from, and make and capture another runner there."
        )

    # -- explain ------------------------------------------------------------------------------------------

    @property
    def refused(self) -> Mapping[ShapeKey, RunEagerly]:
        """The keys that have no recording, or one that is not trusted, and why."""
        return self._refused

    def explain(self) -> str:
        """What is captured, how often each recording was replayed, and why calls ran eagerly."""
        return explained(self)
