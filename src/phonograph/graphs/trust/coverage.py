"""Coverage: which batches that may come have a graph, how far they are padded, and what the others cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from phonograph.errors import CoverageError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.registry import LoadMode
from phonograph.graphs.phases.axes import described
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import Decision, Reason, RecordingGroup, Replay, RunEagerly, ShapeKey
from phonograph.graphs.phases.phase import Sample
from phonograph.graphs.recording.python_state import PythonState
from phonograph.graphs.recording.tensor_state import SavedState, generators_restored
from phonograph.graphs.running.runner import Runner

log = logging.getLogger("phonograph")

_Run = Callable[[Runner, ShapeKey, Sample, Extent], None]
_SEED = 0
_MAX_STATE_BYTES = 1 << 30
_RUNS = 3
_REPEATS = 8


@dataclass(frozen=True)
class Cost:
    """The cost of a batch without a graph next to a replay, in seconds."""

    size: int
    eager: float
    replayed: int = 0
    """The size of the recording that was replayed for comparison; 0 where there is none."""
    replay: float = 0.0

    def __str__(self) -> str:
        text = f"{self.size} take {self.eager * 1e3:.3g} ms eagerly"
        if not self.replay:
            return text
        return f"{text}, a replay of {self.replayed} {self.replay * 1e3:.3g} ms ({self.eager / self.replay:.1f}×)"


@dataclass(frozen=True)
class Gap:
    """Sizes of a product whose batches run eagerly, for one reason."""

    group: RecordingGroup
    first: int
    last: int
    reason: Reason
    detail: str
    """Of the last of these sizes."""
    cost: Cost | None = None
    is_refused: bool = False
    """Whether a batch of them is an error (strict) and does not run."""

    def __str__(self) -> str:
        product, absent = self.group
        whose = ", ".join([described(product), *(f"no {name}" for name in sorted(absent))])
        sizes = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        cost = f"; {self.cost}" if self.cost is not None else ""
        become = "are refused" if self.is_refused else "run eagerly"
        return f"{sizes} of {whose} {become}, {self.reason.value}: {self.detail}{cost}"


@dataclass(frozen=True)
class Coverage:
    """The batches of a phase that may come, by size and product."""

    phase: str
    dim: str
    sizes: range
    num_products: int
    num_covered: int
    """Of all sizes of all products."""
    worst: tuple[int, ShapeKey] | None
    """The size whose replay computes the largest share of padding, and the recording that serves it."""
    gaps: tuple[Gap, ...]
    num_recordings: int
    """Of the phase, when this was found."""

    @property
    def num_batches(self) -> int:
        return len(self.sizes) * self.num_products

    @property
    def worst_padding(self) -> float:
        """The largest share of a replay's rows that is padding."""
        return 1 - self.worst[0] / self.worst[1].size if self.worst is not None else 0.0

    def refuse_gaps(self) -> None:
        """Raise where a batch that may come has no graph."""
        if self.gaps:
            raise CoverageError(f"strict: {self.phase} has no graph for some batches that may come. {self}")

    def __str__(self) -> str:
        products = f" × {self.num_products} products" if self.num_products > 1 else ""
        what = f"{self.dim} {self.sizes.start} to {self.sizes.stop - 1}{products}"
        text = f"coverage of {self.phase}, {what}: {self.num_covered} of {self.num_batches} have a graph"
        if self.worst is not None:
            text += f"; worst padding {self.worst_padding:.0%}: {self.worst[0]} in {self.worst[1]}"
        return "\n".join([text, *(f"  {gap}" for gap in self.gaps)])


def coverage(runner: Runner, sizes: range, *, measured: bool = False) -> Coverage:
    """What becomes of batches of these sizes; of further rules of admission it knows nothing.

    With `measured`, one batch of every gap is run eagerly, and the nearest recording is replayed for comparison; the
    state that they write is put back.
    """
    products, covered, gaps = 0, 0, list[Gap]()
    worst: tuple[int, ShapeKey] | None = None
    for group, decide in runner.decisions():
        products += 1
        for used in sizes:
            decision = _unless_unfilled(runner, decide(used))
            if isinstance(decision, Replay):
                covered += 1
                if worst is None or used * worst[1].size < worst[0] * decision.key.size:
                    worst = used, decision.key
            else:
                _add(gaps, group, used, decision, is_refused=runner.options.strict)
    if measured:
        gaps = [replace(gap, cost=_cost(runner, gap)) for gap in gaps]
    return Coverage(
        runner.phase.name,
        runner.phase.bucketed,
        sizes,
        products,
        covered,
        worst,
        tuple(gaps),
        num_recordings=len(runner.captured),
    )


def _unless_unfilled(runner: Runner, decision: Decision) -> Decision:
    """As decided, but for recordings that serve only batches which fill some dim, of which no less could be tried."""
    if isinstance(decision, Replay):
        dims = [name for name, sizes in runner.tried(decision.key).items() if not sizes]
        if dims:
            return RunEagerly(Reason.NOT_TRIMMED, f"{decision.key} serves only batches that fill {', '.join(dims)}")
    return decision


def _add(gaps: list[Gap], group: RecordingGroup, used: int, decision: RunEagerly, *, is_refused: bool) -> None:
    """One more size without a graph: of the last gap, if that ends just below it for the same reason."""
    last = gaps[-1] if gaps else None
    follows = last is not None and (last.group, last.last, last.reason) == (group, used - 1, decision.reason)
    first = last.first if last is not None and follows else used
    if follows:
        gaps.pop()
    gaps.append(Gap(group, first, used, decision.reason, decision.detail, is_refused=is_refused))


def _cost(runner: Runner, gap: Gap) -> Cost | None:
    """None where a batch can't be run eagerly either: the others are still served."""
    try:
        return _measured_cost(runner, gap)
    except Exception as error:
        what = (str(error).strip().splitlines() or ["no message"])[0]
        size = f"{gap.last} {runner.phase.bucketed}"
        log.warning("%s of %s fail eagerly too (%s: %s)", size, runner.phase.name, type(error).__name__, what)
        return None


def _measured_cost(runner: Runner, gap: Gap) -> Cost:
    phase = runner.phase
    eager = _seconds(runner, ShapeKey(phase.name, phase.bucketed, gap.last, *gap.group), _run_eagerly)
    nearest = min(runner.captured, key=lambda one: (one.group != gap.group, abs(one.size - gap.last)), default=None)
    if nearest is None:
        return Cost(gap.last, eager)
    return Cost(gap.last, eager, nearest.size, _seconds(runner, nearest, _replay))


def steady_seconds(
    runner: Runner, key: ShapeKey, before: Callable[[], None] | None = None, *, repeats: int = _REPEATS
) -> float:
    """How long a replay takes after others of the same recording, without loads, by the device's clock: the least of a
    few looks. The device is never idle between them, as in steps that are launched ahead.

    `before` is called before each look of so many replays, after all else that is launched for it.
    """
    device = runner.device
    begun, ended = device.fence(timed=True), device.fence(timed=True)
    times: list[float] = []

    def repeated(runner: Runner, key: ShapeKey, sample: Sample, extent: Extent) -> None:
        phase, recording = runner.phase, runner.recording(key)
        live = runner.registry.live(sample.batch, extent, kwargs=sample.kwargs, without=phase.without)
        with entering(Current(phase.name, runner.plan.backend, Stage.REPLAYING, live.batch)):
            recording.replay()  # the host launches the rest meanwhile
            if before is not None:
                before()
            begun.record()
            for _ in range(repeats):
                recording.replay()
            ended.record()
        ended.synchronize()
        times.append(ended.seconds_since(begun) / repeats)

    _seconds(runner, key, repeated, first=_replay)
    return min(times)


def _seconds(runner: Runner, key: ShapeKey, run: _Run, first: _Run | None = None) -> float:
    """The least of a few runs; the first, which may compile and allocate, and may be another, does not count."""
    sizes = runner.phase.padded(key.size)
    extent = Extent(sizes, sizes)
    sample = runner.phase.sample_for(key, extent, _SEED)
    times: list[float] = []
    using = runner.pool.using(f"measuring {runner.phase.name}")
    with torch.no_grad(), using, generators_restored(runner.device), _restored(runner, sample) as watching:
        with watching:
            (first or run)(runner, key, sample, extent)
        for _ in range(_RUNS):
            runner.device.synchronize()
            start = time.perf_counter()
            run(runner, key, sample, extent)
            runner.device.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


def _run_eagerly(runner: Runner, key: ShapeKey, sample: Sample, extent: Extent) -> None:
    phase, mode = runner.phase, LoadMode.NO_COPY
    view = runner.registry.load(sample.batch, extent, mode=mode, kwargs=sample.kwargs, without=phase.eager_without)
    if phase.host_plan is not None:
        phase.host_plan(view.batch, extent)
    with entering(Current(phase.name, runner.plan.backend, Stage.EAGER, view.batch)):
        result = phase.forward(view.batch, view.kwargs)
        if phase.tail is not None and not phase.tail_captured:
            phase.tail(result, view.batch)


def _replay(runner: Runner, key: ShapeKey, sample: Sample, extent: Extent) -> None:
    phase = runner.phase
    view = runner.registry.load(sample.batch, extent, kwargs=sample.kwargs, without=phase.without)
    if phase.host_plan is not None:
        phase.host_plan(view.batch, extent)
    live = runner.registry.live(sample.batch, extent, kwargs=sample.kwargs, without=phase.without)
    with entering(Current(phase.name, runner.plan.backend, Stage.REPLAYING, live.batch)):
        runner.recording(key).replay()
        if phase.tail is not None and not phase.tail_captured:
            phase.tail(runner.trimmed(key, extent.used), live.batch)


@contextmanager
def _restored(runner: Runner, sample: Sample) -> Iterator[AbstractContextManager[object]]:
    """State is what it was; what comes out is entered around the first run, and finds what that writes."""
    preserve = runner.phase.preserve
    if preserve is not None:
        with preserve(sample.batch):
            yield nullcontext()
        return
    saved = SavedState(_MAX_STATE_BYTES)
    with PythonState(runner.phase.code).kept():
        try:
            yield saved.watching()
        finally:
            saved.restore()
