"""Capture: records a phase. Every shape is warmed before any is captured, largest first, into one memory pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from phonograph.devices import Device
from phonograph.devices.op_trace import OpTrace
from phonograph.errors import CaptureError, InputWriteError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import RecordingGroup, ShapeKey
from phonograph.graphs.phases.phase import Phase, Sample
from phonograph.graphs.progress import Progress
from phonograph.graphs.recording.backends import Backend, Recording, WarmUp
from phonograph.graphs.recording.binding import CAPTURE_SEED, Binder
from phonograph.graphs.recording.bound import Bound
from phonograph.graphs.recording.capture_report import CaptureReport, CaptureRow, as_capture_error
from phonograph.graphs.recording.captured import Captured
from phonograph.graphs.recording.carried import Carried, FieldReads, carried_by
from phonograph.graphs.recording.compilations import refusing_compilations
from phonograph.graphs.recording.facts import AroundGap, FactRecorder
from phonograph.graphs.recording.garbage import gc_frozen
from phonograph.graphs.recording.guarding import Drawn, Finding, Guard, GuardOptions, drawn_for, following
from phonograph.graphs.recording.made_check import MadeCheck
from phonograph.graphs.recording.outputs import OutputBuffers, Run
from phonograph.graphs.recording.probing import Trimming, find_trimming
from phonograph.graphs.recording.python_state import Moves, PythonState
from phonograph.graphs.recording.tensor_state import SavedState, generators_restored
from phonograph.graphs.recording.warmups import Settled, Warmups
from phonograph.graphs.recording.written_inputs import refusing_input_writes

log = logging.getLogger("phonograph")

_OTHER_SEED = 1
_MAX_STATE_BYTES = 1 << 30


@dataclass(eq=False)
class Capture:
    """One capture of all shapes of a phase."""

    phase: Phase
    device: Device
    registry: Registry
    backend: Backend
    outputs: OutputBuffers
    progress: Progress
    collect_garbage: bool = False
    barrier: Callable[[], None] | None = None
    """Called after every warm-up and capture, also a failed one, where ranks must stay together."""
    trims: bool = True
    """Whether used and padded sizes may differ."""
    facts: FactRecorder | None = None
    guard: GuardOptions = GuardOptions()
    _state: SavedState = field(default_factory=lambda: SavedState(_MAX_STATE_BYTES))
    _warmups: Warmups | None = None
    _settled: dict[ShapeKey, Settled] = field(default_factory=dict)
    _carried: dict[ShapeKey, Carried] = field(default_factory=dict)
    _runs: dict[ShapeKey, list[Run]] = field(default_factory=dict)
    _errors: dict[ShapeKey, CaptureError] = field(default_factory=dict)
    _input_write: InputWriteError | None = None
    _trims: dict[RecordingGroup, Trimming] = field(default_factory=dict)
    _findings: list[Finding] = field(default_factory=list)
    _warm_seconds: float = 0.0
    _binder: Binder = field(init=False)
    _made: MadeCheck = field(init=False)

    def __post_init__(self) -> None:
        self._binder = Binder(self.phase, self.registry, self.backend, self._state)
        self._made = MadeCheck(self._binder, self.device, self.barrier is None, self.guard.sizes)

    @contextmanager
    def warmed(self, keys: Sequence[ShapeKey]) -> Iterator[None]:
        """Inside, every shape has run; afterwards the model's state and the random numbers are what they were."""
        start = time.perf_counter()
        with torch.no_grad(), gc_frozen(self.collect_garbage), self._state_restored(), generators_restored(self.device):
            self._warm_all(keys)
            self._trims = self._trimmings(keys)
            for runs in self._runs.values():
                self.outputs.expect(runs[0].outputs)
            self.outputs.allocate()
            self._warm_seconds = time.perf_counter() - start
            yield

    def record(self, keys: Sequence[ShapeKey]) -> Captured:
        """Capture all that could be warmed."""
        start = time.perf_counter()
        # Warm-ups may still be running on the device, and their memory is needed now.
        self.device.synchronize()
        self.device.free_unused()
        self._warm_seconds += time.perf_counter() - start
        rows, recordings = self._capture_all(keys)
        if not recordings and self._warmups is not None:
            self._warmups.forget()
        seconds = self._warm_seconds + sum(row.seconds for row in rows)
        report = CaptureReport(tuple(rows), self._warm_seconds, seconds, findings=tuple(self._findings))
        for row in report.failures:
            log.warning("%s", row.error)
        kind, watched = self.device.torch_device.type, self.facts if recordings else None
        facts = watched.settled(kind, recordings) if watched is not None else None
        return Captured(recordings, self._carried, self._trims, report, facts)

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Warm-ups run for real: afterwards the model's own state is what it was before."""
        try:
            yield
        except BaseException:
            if self._warmups is not None:
                self._warmups.forget()
            raise
        finally:
            self._state.restore()
            if self._state.skipped_bytes:
                log.warning(
                    "capturing %s: warm-ups wrote to %s bytes of tensors that are too large to save. "
                    "Have sample() point at rows that no request uses, and say so with Phase(preserve=…).",
                    self.phase.name,
                    f"{self._state.skipped_bytes:,}",
                )

    def _warm_all(self, keys: Sequence[ShapeKey]) -> None:
        if self.phase.preserve is None:
            self._warmups = Warmups(
                PythonState(self.phase.code),
                self._state,
                may_rerun=self.barrier is None,
                ignored=self.facts.ignored if self.facts is not None else (),
            )
            for key in keys:
                self._attempt(key, self._first_run)
                self._attempt(key, self._second_run)
            self._refuse_moved(keys)
            self._warmups.warn_if_cut_short(self.phase.name)
        else:
            # The phase declares what its body writes, so there is no search; the largest shape sizes the workspaces.
            for key in keys:
                if key.size in (keys[0].size, keys[-1].size):
                    self._attempt(key, lambda key: self._run_warm_up(key, WarmUp.FREE))
        self._binder.prepare([key for key in keys if key not in self._errors], self._kept, self.progress)
        self._made.keys = keys if not self.backend.records_body else ()
        for index, key in enumerate(keys):
            self._attempt(key, self._rehearse)
            if self._made.keys:
                self._attempt(key, self._check_made)
            self.progress(f"warming {key}", index + 1, len(keys))
        for key in reversed(self._made.keys):  # of a program whose smallest have failed, the next
            self._attempt(key, self._check_made)
        self._errors = self._made.refused() | self._errors
        if self.guard.mode != "off":
            self._guard_all(keys)

    def _check_made(self, key: ShapeKey) -> None:
        """Compare what the backend made with the body; the body's run is also the one that facts are confirmed by."""
        if self._made.is_asked(key, self._errors):
            self._made.compare(key, self._kept, self._watched)
        if self.facts is not None and self.facts.lacks(key) and self.barrier is None:
            self._made.run_body(key, self._kept, self._watched)

    def _guard_all(self, keys: Sequence[ShapeKey]) -> None:
        """Refuse or report shapes whose ops depend on the sample."""
        guard = Guard(self.phase, self._trace, self.registry.measure, 3 if self.barrier is None else 1)
        refused = guard.look(keys, self.guard, self._attempt, trims=self.trims)
        self._findings = guard.findings
        for key, difference in refused.items():
            self._errors.setdefault(key, as_capture_error(difference.error(), key))

    def _trace(self, key: ShapeKey, drawn: Drawn, trace: OpTrace) -> None:
        """One rehearsal on a sample, whose ops are noted."""
        trial = self._binder.trial(key, drawn)
        with self._kept(key), trial as bound, entering(following(trace, bound.now)), trace.following():
            self.backend.warm_up(key, bound.body, WarmUp.REHEARSAL)

    def _attempt(self, key: ShapeKey, step: Callable[[ShapeKey], None]) -> None:
        """One step of a key that has not failed yet; followed by the barrier of ranks, whether it ran or not."""
        if key not in self._errors:
            try:
                self._refuse_input_write()
                step(key)
            except Exception as error:
                self._errors[key] = found = as_capture_error(error, key)
                if self.facts is not None:
                    self.facts.give_up(key)
                if isinstance(found, InputWriteError):
                    self._input_write = found
        if self.barrier is not None:
            self.barrier()

    def _refuse_input_write(self) -> None:
        """An input write that one size shows is refused for all sizes."""
        found = self._input_write
        if found is not None:
            raise InputWriteError(found.problem, found.remedy, frame=found.frame)

    def _first_run(self, key: ShapeKey) -> None:
        assert self._warmups is not None
        self._warmups.first(lambda: self._bind_freely(key))

    def _second_run(self, key: ShapeKey) -> None:
        assert self._warmups is not None
        other = partial(self._bind_freely, key, _OTHER_SEED)
        self._settled[key] = self._warmups.second(lambda: self._bind_freely(key), other)

    def _bind_freely(self, key: ShapeKey, seed: int = CAPTURE_SEED) -> Callable[[Moves | None], Any]:
        assert self._warmups is not None
        bound = self._binder.bound(key, Stage.WARMING, drawn_for(self.phase, key, seed))
        self._warmups.python.reach(bound.others)
        noting_gaps = replace(bound.now, on_gap=self._warmups.note_gap)

        def run(moves: Moves | None) -> Any:
            around = nullcontext if moves is None else moves.around_gap
            unwritten = refusing_input_writes(bound.inputs) if moves is None else nullcontext()
            now = noting_gaps if moves is None else bound.now
            with generators_restored(self.device), unwritten, self._late_reads(bound), self._watched(key, now, around):
                result = self.backend.warm_up(key, bound.body, WarmUp.FREE)
            self.outputs.standing.note(result)
            return result

        return run

    def _late_reads(self, bound: Bound) -> AbstractContextManager[None]:
        if self.facts is None or self.facts.alone or self._warmups is None:
            return nullcontext()
        return self.facts.late_reads.noting(bound.inputs, self._warmups.python.now.name_of_memory)

    def _refuse_moved(self, keys: Sequence[ShapeKey]) -> None:
        """Python state that one shape changes, the others may have read: all are refused."""
        moved = self._warmups.moved if self._warmups is not None else None
        if moved is not None:
            for key in keys:
                error = CaptureError(moved.problem, moved.remedy, frame=moved.frame, shape=str(key))
                self._errors.setdefault(key, error)

    def _rehearse(self, key: ShapeKey) -> None:
        try:
            if self._made.is_asked(key, self._errors):
                self._note_run(key, self._made.rehearse(key, self._kept))
                return
            self._run_warm_up(key, WarmUp.REHEARSAL)
            if self.facts is not None and self.facts.lacks(key) and self.barrier is None:
                self._run_warm_up(key, WarmUp.REHEARSAL)  # what only one run reads may be a temporary
        except Exception as error:
            if self.barrier is not None:
                raise  # an extra run would wait for the other ranks forever
            self._rehearse_again(key, error)

    def _rehearse_again(self, key: ShapeKey, error: Exception) -> None:
        """Run once more with every op watched, to name op and line; after a free run where the key has had none.

        The free run may already create what was missing.
        """
        found, is_new = as_capture_error(error, key), self.phase.preserve is not None
        if is_new or not isinstance(error, CaptureError):
            try:
                if is_new:
                    self._run_warm_up(key, WarmUp.FREE)
                self._run_warm_up(key, WarmUp.DIAGNOSIS)
            except Exception as second:
                found = as_capture_error(second, key)
            else:
                if is_new:
                    return
        raise found

    def _run_warm_up(self, key: ShapeKey, warm_up: WarmUp) -> None:
        with self._kept(key):
            bound = self._binder.bound(key, Stage.WARMING)
            free = warm_up is WarmUp.FREE
            unwritten = refusing_input_writes(bound.inputs) if free else nullcontext()
            is_body = self.backend.records_body or self._binder.made is None  # facts are the body's
            watched = self._watched(key, bound.now) if is_body else entering(bound.now)
            with self._preserved(bound.batch), unwritten, watched:
                result = self.backend.warm_up(key, bound.body, warm_up)
            if free:
                self.outputs.standing.note(result)
            else:
                self._note_run(key, result)

    def _note_run(self, key: ShapeKey, result: Any) -> None:
        self._runs[key] = [Run(self.phase.padded(key.size), self.outputs.specs_of(result))]

    @contextmanager
    def _watched(self, key: ShapeKey, now: Current, around_gap: AroundGap = nullcontext) -> Iterator[None]:
        """Make `now` current, and note what is read."""
        watching = nullcontext(around_gap) if self.facts is None else self.facts.watching(key, around_gap)
        with watching as around, entering(replace(now, around_gap=around)):
            yield

    def _kept(self, key: ShapeKey) -> AbstractContextManager[None]:
        """Python values are what the key's warm-ups made, and afterwards what they were."""
        if self._warmups is None:
            return nullcontext()
        return self._warmups.rehearsed(self._settled.get(key, Settled()))

    def _preserved(self, batch: Any) -> AbstractContextManager[None]:
        return self.phase.preserve(batch) if self.phase.preserve is not None else nullcontext()

    def _trimmings(self, keys: Sequence[ShapeKey]) -> dict[RecordingGroup, Trimming]:
        grouped: dict[RecordingGroup, list[ShapeKey]] = {}
        for key in keys:
            if key not in self._errors:
                grouped.setdefault(key.group, []).append(key)
        return {group: found for group, members in grouped.items() if (found := self._trimming(members)) is not None}

    def _trimming(self, members: Sequence[ShapeKey]) -> Trimming | None:
        """How the outputs of a group are trimmed; None where that can't be told, and its keys have failed."""
        runs, key = [run for key in members for run in self._runs[key]], members[-1]
        has_limits = any(dim.limit is not None for dim in self.phase.all_dims.values())
        if not self.trims and not has_limits:
            return Trimming()
        try:
            return find_trimming(
                self.phase, key.size, runs, lambda sizes: self._probe(key, sizes), exact=not self.trims
            )
        except CaptureError as error:
            for one in members:
                self._errors[one] = CaptureError(error.problem, error.remedy, shape=str(one))
        except Exception as error:
            self._errors[key] = failed = as_capture_error(error, key)
            failed.remedy = (
                f"The body must run at other sizes than {key.size}, or use Buckets.of({key.size}, exact=True)"
            )
        return None

    def _probe(self, key: ShapeKey, sizes: Mapping[str, int]) -> Run:
        """An eager run at other sizes."""
        extent = Extent(sizes, sizes)
        with self._kept(key):
            sample = self.phase.sample_for(key, extent, CAPTURE_SEED)
            view = self._binder.load(sample, extent, LoadMode.EAGER)
            if self.phase.host_plan is not None:
                self.phase.host_plan(view.batch, extent)
            now = Current(self.phase.name, self.backend.name, Stage.WARMING, view.batch)
            watching = self._state.watching() if self.phase.preserve is None else nullcontext()
            with entering(now), self._preserved(sample.batch), watching:
                result = self._binder.forward(view)
            return Run(sizes, self.outputs.specs_of(result))

    def _capture_all(self, keys: Sequence[ShapeKey]) -> tuple[list[CaptureRow], dict[ShapeKey, Recording]]:
        rows: list[CaptureRow] = []
        recordings: dict[ShapeKey, Recording] = {}
        used = self.device.memory().used
        for index, key in enumerate(keys):
            begin, before = time.perf_counter(), used
            recording = self._capture(key)
            used = self.device.memory().used
            seconds = time.perf_counter() - begin
            num_graphs = len(recording.graphs) if recording else 0
            rows.append(CaptureRow(key, seconds, max(0, used - before), num_graphs, self._errors.get(key)))
            if recording is not None:
                recordings[key] = recording
            self.progress(f"capturing {key}", index + 1, len(keys))
        return rows, recordings

    def _capture(self, key: ShapeKey) -> Recording | None:
        recordings: list[Recording] = []

        def record(key: ShapeKey) -> None:
            try:
                recordings.append(self._recorded(key))
            except Exception as error:
                raise self._named(key, error) from None

        self._attempt(key, record)
        return recordings[0] if recordings else None

    def _named(self, key: ShapeKey, error: Exception) -> Exception:
        """An error that names op and line, in place of the device's own.

        A body that catches what a rehearsal refuses goes on; the device reports only later that the capture is invalid.
        """
        if self.barrier is None and not isinstance(error, CaptureError):
            try:
                self._run_warm_up(key, WarmUp.DIAGNOSIS)
            except Exception as second:  # the device may be unusable after the failure
                return second if isinstance(second, CaptureError) else error
        return error

    def _recorded(self, key: ShapeKey) -> Recording:
        with self._kept(key):
            as_written = self.backend.records_body
            reads = FieldReads() if as_written else self._made.reads_of(key)
            noting = reads.noting if as_written and not self.phase.compares_others else None
            bound = self._binder.bound(key, Stage.CAPTURING, as_written=as_written, noting=noting)
            with entering(bound.now), self._preserved(bound.batch), refusing_compilations():
                recording = self.backend.capture(key, lambda: self.outputs.store(bound.body()))
            self._carried[key] = carried_by(self.phase, key, Sample(bound.batch, bound.kwargs), reads)
        recording.holds = self._settled.get(key, Settled()).holds
        recording.made = partial(self._binder.made.of, key) if self._binder.made and not as_written else None
        return recording
