"""Records a phase: every shape is warmed before any is captured, largest first, into one memory pool."""

from __future__ import annotations

import gc
import linecache
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.devices import Device
from phonograph.devices.trace import raising_frame
from phonograph.errors import CaptureError, InputWriteError, PhonographError
from phonograph.graphs.backends import Backend, Body, Recording, WarmUp
from phonograph.graphs.buffers import LoadMode, Registry
from phonograph.graphs.context import Current, Stage, entering
from phonograph.graphs.decisions import ShapeKey
from phonograph.graphs.extent import Extent
from phonograph.graphs.outputs import OutputBuffers, Run, trimmed_axes
from phonograph.graphs.phase import Phase
from phonograph.graphs.progress import Progress
from phonograph.graphs.snapshots import snapshot
from phonograph.graphs.state import SavedState
from phonograph.graphs.tree import Path
from phonograph.graphs.written import refusing_input_writes

log = logging.getLogger("phonograph")

_CAPTURE_SEED = 0
_MAX_STATE_BYTES = 1 << 30
_LOOK = "Run the body eagerly under a debugger; a call that no graph can hold needs @graph_break, backend='breakable'"


@dataclass(frozen=True)
class CaptureRow:
    """One line of the capture table."""

    key: ShapeKey
    seconds: float
    num_bytes: int
    num_graphs: int
    error: CaptureError | None = None


@dataclass(frozen=True)
class CaptureReport:
    """What a capture made, and what it could not make."""

    rows: tuple[CaptureRow, ...]
    warm_seconds: float
    seconds: float

    @property
    def failures(self) -> tuple[CaptureRow, ...]:
        return tuple(row for row in self.rows if row.error is not None)

    def __str__(self) -> str:
        lines = [f"{'recording':<28} {'graphs':>6} {'seconds':>9} {'bytes':>14}"]
        for row in self.rows:
            if row.error is None:
                lines.append(f"{row.key!s:<28} {row.num_graphs:>6} {row.seconds:>9.4f} {row.num_bytes:>14,}")
            else:
                lines.append(f"{row.key!s:<28} failed: {row.error}")
        made = [row for row in self.rows if row.error is None]
        total = sum(row.num_bytes for row in made)
        lines.append(
            f"{f'{len(made)} of {len(self.rows)} captured':<28} {sum(r.num_graphs for r in made):>6} "
            f"{self.seconds:>9.4f} {total:>14,}  (warm-up {self.warm_seconds:.4f} s of it)"
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Bound:
    """A body on the buffers' views, what is current while it runs, and the sample that was loaded."""

    body: Body
    now: Current
    batch: Any
    inputs: dict[str, torch.Tensor]
    """What was loaded for each slot that the batch fills."""


@dataclass(eq=False)
class Captured:
    """The recordings of a phase, and how to trim what they put out."""

    recordings: dict[ShapeKey, Recording]
    carried: dict[ShapeKey, dict[str, Any]]
    """Snapshots of what each recording's sample had besides slots, where it is a dict: replays keep these values."""
    axes: dict[tuple[str, frozenset[str]], dict[Path, dict[int, str]]]
    report: CaptureReport


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
    """Called between warm-ups where ranks must stay together."""
    trims: bool = True
    """Whether used and padded sizes may differ."""
    _state: SavedState = field(default_factory=lambda: SavedState(_MAX_STATE_BYTES))
    _carried: dict[ShapeKey, dict[str, Any]] = field(default_factory=dict)
    _runs: dict[ShapeKey, list[Run]] = field(default_factory=dict)
    _errors: dict[ShapeKey, CaptureError] = field(default_factory=dict)
    _input_write: InputWriteError | None = None
    _axes: dict[tuple[str, frozenset[str]], dict[Path, dict[int, str]]] = field(default_factory=dict)
    _warm_seconds: float = 0.0

    @contextmanager
    def warmed(self, keys: Sequence[ShapeKey]) -> Iterator[None]:
        """Inside, every shape has run; afterwards the model's state and the random numbers are what they were."""
        start = time.perf_counter()
        with torch.no_grad(), gc_frozen(self.collect_garbage), self._state_restored(), generators_restored(self.device):
            self._warm_all(keys)
            self._axes = self._trimmed_axes(keys)
            for runs in self._runs.values():
                self.outputs.expect(runs[0].outputs)
            self.outputs.allocate()
            self._warm_seconds = time.perf_counter() - start
            yield

    def record(self, keys: Sequence[ShapeKey]) -> Captured:
        """Capture all that could be warmed."""
        start = time.perf_counter()
        # Warm-ups may still run on the device, and their memory is wanted now.
        self.device.synchronize()
        self.device.free_unused()
        self._warm_seconds += time.perf_counter() - start
        rows, recordings = self._capture_all(keys)
        seconds = self._warm_seconds + sum(row.seconds for row in rows)
        report = CaptureReport(tuple(rows), self._warm_seconds, seconds)
        for row in report.failures:
            log.warning("%s", row.error)
        return Captured(recordings, self._carried, self._axes, report)

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Warm-ups run for real: afterwards the model's own state is what it was before."""
        try:
            yield
        finally:
            self._state.restore()
            if self._state.skipped_bytes:
                log.warning(
                    "capturing %s: warm-ups wrote to %s bytes of tensors that are too large to save. "
                    "Have sample() point at rows that nobody uses, and say so with Phase(preserve=…).",
                    self.phase.name,
                    f"{self._state.skipped_bytes:,}",
                )

    def _keeping(self, batch: Any, *, first: bool) -> AbstractContextManager[None]:
        """Saves what a trial run of this batch writes; the first run of a shape shows what that is."""
        if self.phase.preserve is not None:
            return self.phase.preserve(batch)
        return self._state.watching() if first else nullcontext()

    def _bind(self, key: ShapeKey, stage: Stage) -> _Bound:
        """Load a sample for the key."""
        padded = self.phase.padded(key.size)
        extent = Extent(padded, padded)
        sample = self.phase.sample_for(key, extent, _CAPTURE_SEED)
        view = self.registry.load(sample.batch, extent, beside=sample.beside, without=self.phase.without)
        if self.phase.plan is not None:
            self.phase.plan(view.batch, extent)
        now = Current(self.phase.name, self.backend.name, stage, view.batch)
        inputs = self.phase.inputs(view.batch, view.beside, self.phase.without)
        return _Bound(lambda: self.phase.forward(view.batch, view.beside), now, sample.batch, inputs)

    def _warm_all(self, keys: Sequence[ShapeKey]) -> None:
        # The largest brings workspaces to their final size; both ends show which state bodies write.
        for key in keys:
            if key.size in (keys[0].size, keys[-1].size):
                self._warm(key, WarmUp.FREE)
        for index, key in enumerate(keys):
            self._warm(key, WarmUp.REHEARSAL)
            self.progress(f"warming {key}", index + 1, len(keys))

    def _warm(self, key: ShapeKey, warm_up: WarmUp) -> None:
        if key in self._errors:
            return
        try:
            self._run_warm_up(key, warm_up)
        except Exception as error:
            self._errors[key] = found = self._diagnosed(key, error)
            if isinstance(found, InputWriteError):
                self._input_write = found  # what one size shows holds for all
        if self.barrier is not None:
            self.barrier()

    def _run_warm_up(self, key: ShapeKey, warm_up: WarmUp) -> None:
        if self._input_write is not None:
            raise InputWriteError(self._input_write.problem, self._input_write.remedy, frame=self._input_write.frame)
        bound = self._bind(key, Stage.WARMING)
        first = warm_up is WarmUp.FREE
        unwritten = refusing_input_writes(bound.inputs) if first else nullcontext()
        with entering(bound.now), self._keeping(bound.batch, first=first), unwritten:
            result = self.backend.prepare(key, bound.body, warm_up)
        if first:
            self.outputs.standing.note(result)
        else:
            self._runs[key] = [Run(self.phase.padded(key.size), self.outputs.specs_of(result))]

    def _diagnosed(self, key: ShapeKey, error: Exception) -> CaptureError:
        """The error of a warm-up, named by op and line: a second run watches every op, which the first need not."""
        found = as_capture_error(error, key)
        if not isinstance(error, CaptureError):
            try:
                self._run_warm_up(key, WarmUp.DIAGNOSIS)
            except Exception as second:
                found = as_capture_error(second, key)
        return found

    def _trimmed_axes(self, keys: Sequence[ShapeKey]) -> dict[tuple[str, frozenset[str]], dict[Path, dict[int, str]]]:
        grouped: dict[tuple[str, frozenset[str]], list[ShapeKey]] = {}
        for key in keys:
            if key not in self._errors:
                grouped.setdefault((key.variant, key.absent), []).append(key)
        axes: dict[tuple[str, frozenset[str]], dict[Path, dict[int, str]]] = {}
        for group, members in grouped.items():
            runs = [run for key in members for run in self._runs[key]]
            if not self.trims:
                axes[group] = {}
                continue
            has_limits = any(dim.limit is not None for dim in self.phase.all_dims.values())
            if len(members) == 1 or has_limits:
                # Sizes that never change can't tell an axis that follows a dim from one that only equals it.
                runs += self._probe(members[-1], must_run=len(members) == 1)
            try:
                axes[group] = trimmed_axes(runs)
            except CaptureError as error:
                for key in members:
                    self._errors[key] = CaptureError(error.problem, error.remedy, shape=str(key))
        return axes

    def _probe(self, key: ShapeKey, *, must_run: bool) -> list[Run]:
        """An eager run at other sizes; a body that must run but has only one size fails here, and its key with it."""
        sizes = self.phase.padded(key.size - 1 if key.size > 1 else 2)
        for name, dim in self.phase.all_dims.items():
            if dim.limit is not None:
                # No two dims of one size, as far as that can be: an axis must not seem to follow both.
                others = {size for other, size in sizes.items() if other != name}
                sizes[name] = next((size for size in range(dim.limit - 1, 0, -1) if size not in others), 1)
        extent = Extent(sizes, sizes)
        without = self.phase.without
        try:
            sample = self.phase.sample_for(key, extent, _CAPTURE_SEED)
            view = self.registry.load(sample.batch, extent, mode=LoadMode.EAGER, beside=sample.beside, without=without)
            if self.phase.plan is not None:
                self.phase.plan(view.batch, extent)
            now = Current(self.phase.name, self.backend.name, Stage.WARMING, view.batch)
            with entering(now), self._keeping(sample.batch, first=True):
                result = self.phase.forward(view.batch, view.beside)
            return [Run(sizes, self.outputs.specs_of(result))]
        except Exception as error:
            failed = as_capture_error(error, key)
            if not must_run:
                return []
            failed.remedy = (
                f"The body must run at other sizes than {key.size}, or use Buckets.of({key.size}, exact=True)"
            )
            self._errors[key] = failed
            return []

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
        if key in self._errors:
            return None
        try:
            bound = self._bind(key, Stage.CAPTURING)
            if isinstance(bound.batch, dict):
                slots = {slot.path[0] for slot in self.phase.slots}
                self._carried[key] = {name: snapshot(value) for name, value in bound.batch.items() if name not in slots}
            with entering(bound.now), self._keeping(bound.batch, first=False):
                return self.backend.capture(key, lambda: self.outputs.store(bound.body()))
        except Exception as error:
            self._errors[key] = as_capture_error(error, key)
            return None


def as_capture_error(error: Exception, key: ShapeKey) -> CaptureError:
    """The error with the shape it belongs to; its frames are let go, since they hold the body's tensors."""
    if isinstance(error, CaptureError):
        error.shape = str(key)
        found = error
    else:
        frame = raising_frame(error.__traceback__)
        line = linecache.getline(frame.file, frame.line).strip() if frame else ""
        what = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        problem = what if isinstance(error, PhonographError) else f"{type(error).__name__}: {what}"
        at = f", at `{line}`" if line else ""
        found = CaptureError(f"{problem}{at}", _LOOK, op=line, frame=frame, shape=str(key))
    traceback.clear_frames(error.__traceback__)
    return found.with_traceback(None)


def generators_restored(device: Device) -> AbstractContextManager[None]:
    """Random numbers drawn inside are not missing outside."""
    on = device.torch_device
    if on.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([on], device_type=on.type)


@contextmanager
def gc_frozen(collect: bool) -> Iterator[None]:
    """Keep the garbage collector from running: a collection in the middle of a capture may free device memory.

    Where it is off already, that is somebody's who also collects.
    """
    if collect or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
