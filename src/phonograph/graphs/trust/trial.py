"""Trial: one recording on one random batch, run in several ways from the same start, and everything put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import BaseTorchFunctionMode

from phonograph.errors import InputWriteError, VerifyError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.fields import expose, fetch, fields_of
from phonograph.graphs.inputs.registry import LoadMode, View
from phonograph.graphs.inputs.tree import TreePath
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.phase import Sample
from phonograph.graphs.recording.backends import Body
from phonograph.graphs.recording.bound import named_state
from phonograph.graphs.recording.python_state import PythonState
from phonograph.graphs.recording.tensor_state import SavedState, generators_restored
from phonograph.graphs.recording.weight_caches import weights_uncached
from phonograph.graphs.recording.written_inputs import refusing_input_writes
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.left_out import ReadsOfLeftOut

_MAX_STATE_BYTES = 1 << 30
_FAR_SEED = 1_000_003
"""Distance between seeds: generators with neighbouring seeds draw similar first numbers."""
_NOTHING: AbstractContextManager[object] = nullcontext()

State = Mapping[str, torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """Outputs of one run, and the state after it."""

    outputs: Mapping[TreePath, Any]
    start: State
    """State before the run."""
    state: State
    """State after it."""
    next_draw: torch.Tensor
    """What is drawn next: it tells how many random numbers the run has drawn."""


@dataclass(frozen=True)
class Way:
    """How a batch is run."""

    padded: bool = True
    replay: bool = False
    pattern: int = 1
    """The poison in unread padding."""
    poisons: bool = True
    """Whether the memory of other recordings gets poison too, which takes as long as there is memory."""
    noisy: bool = False
    """Whether state that was found begins with noise: what padding writes may be there already."""
    key: ShapeKey | None = None
    """Whose recording is replayed, where it is not the trial's own."""
    made: bool = False
    """Whether an eager run is of what was recorded in the place of the body."""
    in_function_mode: bool = False
    """Whether an eager run has a TorchFunctionMode around it, as captures of some devices do."""


class Trial:
    """The runs of one recording's batch. Each is made once, when it is first asked for."""

    def __init__(
        self,
        runner: Runner,
        key: ShapeKey,
        sizes: Mapping[str, int],
        seed: int,
        state: Sequence[torch.Tensor] = (),
        python: PythonState | None = None,
        served: ShapeKey | None = None,
    ) -> None:
        self.runner, self.key, self.seed = runner, key, seed
        self.served = served if served is not None else key
        """Whose batches are tried: the recording's own, or those that it stands in for."""
        self._python = python
        phase, unpadded = runner.phase, Extent(sizes, sizes)
        self.sample: Sample = phase.sample_for(self.served, unpadded, seed)
        measured = runner.registry.measure(self.sample.batch, self.sample.kwargs)
        self.extent = Extent(measured, phase.padded(key.size))
        self.unpadded = Extent(measured, measured)
        self.used = measured[phase.bucketed]
        self.reach(self.sample)
        self.memory = list(state)
        self.elements = {f"state[{index}]": tensor for index, tensor in enumerate(state)}
        self._results: dict[object, Any] = {}
        self.input_write = ""
        """How the body writes to an input, if it does."""
        self.left_out_read = ""
        """How the body reads a slot that graphs leave out, if it does."""
        self.num_unsaved_bytes = 0
        """State that is too large to compare."""
        self.on_return: Callable[[Any], None] = lambda outputs: None
        """Told of what the body returns in an eager run, before that is trimmed and copied."""

    @property
    def is_served(self) -> bool:
        """Whether a replay serves the sample: it must fill the dims that the body ran at one size of only."""
        used, padded = self.extent.used, self.extent.padded
        return all(sizes or used[name] == padded[name] for name, sizes in self.runner.tried(self.key).items())

    @property
    def makes_noise(self) -> bool:
        """Whether there is state that was found: what a phase preserves it fills itself."""
        return bool(self.elements) and self.extent.is_padded

    def result(self, way: Way) -> Result:
        """What a run gives; raises what it raised."""
        return self._once(way, lambda: self._ran(way))

    def result_of(self, sample: Sample, *, instead: State | None = None, watching: Any = _NOTHING) -> Result:
        """What another sample gives without padding, after noise; `instead` is state that then takes its place."""
        self.reach(sample)
        sizes = self.runner.registry.measure(sample.batch, sample.kwargs)
        return self._ran(Way(padded=False, noisy=True), sample, Extent(sizes, sizes), instead, watching)

    def watched(
        self, way: Way, watching: AbstractContextManager[object] = _NOTHING, sample: Sample | None = None
    ) -> Result:
        """A run of its own with something around the body."""
        return self._ran(way, sample, watching=watching)

    def null_sample(self, *, full: bool = False) -> Sample:
        """The smallest batch, or one that fills the bucket, with what padding has in every slot."""
        phase = self.runner.phase
        size = self.extent.padded if full else phase.padded(phase.smallest)
        sample = phase.sample_for(self.served, Extent(size, size), self.seed)
        sizes = self.runner.registry.measure(sample.batch, sample.kwargs)
        values: dict[Any, Any] = {}
        for slot in phase.slots:
            found = fetch(sample.batch, sample.kwargs, slot.path) if slot.compute is None else None
            if found is not None:
                on = found.device if isinstance(found, torch.Tensor) else "cpu"
                values[slot.path] = torch.full(slot.sizes(sizes), slot.filler, dtype=slot.dtype, device=on)
        aside = {path: value for path, value in values.items() if path[0] in sample.kwargs}
        within = {path: value for path, value in values.items() if path not in aside}
        return Sample(expose(sample.batch, within), expose(dict(sample.kwargs), aside))

    def full_sample(self, turn: int = 0) -> Sample:
        """A batch that fills the bucket; another one for every turn."""
        padded = self.extent.padded
        return self.runner.phase.sample_for(self.served, Extent(padded, padded), self.seed + turn * _FAR_SEED)

    @property
    def untouched_draw(self) -> torch.Tensor:
        """What is drawn next where nothing was drawn."""
        with generators_restored(self.runner.device):
            self._seed_generators()
            return self._next_draw()

    # -- what a body writes and reads ---------------------------------------------------------------------

    def discover(self) -> None:
        """Find all memory from outside that the body writes, by runs whose effects are undone."""
        self._once("discovered", self._discover)

    def _discover(self) -> None:
        preserve = self.runner.phase.preserve
        if preserve is not None:
            with preserve(self.sample.batch) as kept:
                if kept is not None:
                    return  # the phase says what live rows may read
        saved = SavedState(_MAX_STATE_BYTES)
        try:
            with self._python.followed() if self._python is not None else nullcontext():
                for padded in (True, False):
                    self._watch(saved, padded=padded)
        finally:
            if preserve is None:
                saved.restore()
        if saved.skipped_bytes and preserve is None:
            raise VerifyError(
                f"verifying {self.key}: the body writes {saved.skipped_bytes:,} bytes of tensors too large to copy. "
                "Give the phase a `preserve` that saves the rows that a batch touches."
            )
        self.num_unsaved_bytes = saved.skipped_bytes
        self.memory += saved.memory
        for index, tensor in enumerate(saved.elements):
            if self.runner.registry.holds(tensor):
                continue  # an input, which is no state
            self.elements[self._name_of(tensor) or f"tensor {index}"] = tensor

    def _watch(self, saved: SavedState, *, padded: bool) -> None:
        suspects = list(self._python.now.tensors.values()) if self._python is not None else []
        way = Way(padded=padded)
        # What else is raised here, the checks that need this run raise again; what was written is known all the same.
        with suppress(Exception):
            try:
                self._ran(way, watching=_Watching(lambda: saved.watching(suspects), self, refuses=True))
            except InputWriteError as error:
                alike = same_memory(self.runner, self.sample)
                self.input_write = self.input_write or f"{error.problem}{_at(error.frame)}. {error.remedy}{alike}"
                self._ran(way, watching=_Watching(lambda: saved.watching(suspects), self, refuses=False))

    def _name_of(self, tensor: torch.Tensor) -> str:
        return self._python.now.name_of_memory(tensor.untyped_storage()) if self._python is not None else ""

    def reach(self, sample: Sample) -> None:
        if self._python is not None:
            self._python.reach([*fields_of(sample.batch), *sample.kwargs.values()])

    # -- runs ---------------------------------------------------------------------------------------------

    def _once(self, name: object, make: Callable[[], T]) -> T:
        if name not in self._results:
            try:
                self._results[name] = make()
            except Exception as error:
                self._results[name] = _Raised(error)
        found = self._results[name]
        if isinstance(found, _Raised):
            raise found.error
        result: T = found
        return result

    def _ran(
        self,
        way: Way,
        sample: Sample | None = None,
        extent: Extent | None = None,
        instead: State | None = None,
        watching: AbstractContextManager[object] = _NOTHING,
    ) -> Result:
        sample = sample if sample is not None else self.sample
        extent = extent if extent is not None else self.extent if way.padded or way.replay else self.unpadded
        with self.started(sample, instead, noisy=way.noisy) as state:
            start = {name: tensor.clone() for name, tensor in state.items()}
            run = self.run(way, sample, extent, watching)
            return Result(run, start, {name: t.clone() for name, t in state.items()}, self._next_draw())

    def run(
        self, way: Way, sample: Sample, extent: Extent, watching: AbstractContextManager[object] = _NOTHING
    ) -> dict[TreePath, Any]:
        """The outputs of one run, from whatever state there is."""
        return self._replay(way, sample, extent) if way.replay else self._eager(way, sample, extent, watching)

    def _replay(self, way: Way, sample: Sample, extent: Extent) -> dict[TreePath, Any]:
        runner, phase, key = self.runner, self.runner.phase, way.key if way.key is not None else self.key
        given: dict[str, Any] = {"kwargs": sample.kwargs, "without": phase.without}
        view = runner.registry.load(sample.batch, extent, **given, anew=True)
        runner.registry.poison_unread(extent, way.pattern)
        if way.poisons:
            runner.memory.poison(way.pattern)
        if phase.host_plan is not None:
            phase.host_plan(view.batch, extent)
        live = runner.registry.live(sample.batch, extent, **given)
        with entering(Current(phase.name, runner.plan.backend, Stage.REPLAYING, live.batch)):
            runner.recording(key).replay()
        return runner.parts(runner.trimmed(key, extent.used))

    def _eager(
        self, way: Way, sample: Sample, extent: Extent, watching: AbstractContextManager[object]
    ) -> dict[TreePath, Any]:
        runner, phase = self.runner, self.runner.phase
        mode = LoadMode.GRAPH if way.padded else LoadMode.EAGER
        without = phase.without if way.padded else phase.eager_without
        view = runner.registry.load(sample.batch, extent, mode=mode, kwargs=sample.kwargs, without=without, anew=True)
        if way.padded:
            runner.registry.poison_unread(extent, way.pattern)
        if phase.host_plan is not None:
            phase.host_plan(view.batch, extent)
        live = view.batch
        if extent.is_padded:
            live = runner.registry.live(sample.batch, extent, kwargs=sample.kwargs).batch
        now = Current(phase.name, runner.plan.backend, Stage.EAGER, live)
        if isinstance(watching, _Watching):
            now = watching.prepared(now, view.batch, view.kwargs, without)
        body = self._body(way, view)
        mode_around = BaseTorchFunctionMode() if way.in_function_mode else nullcontext()
        with entering(now), weights_uncached(), watching, mode_around:
            outputs = body()
        self.on_return(outputs)
        if way.padded:
            outputs = runner.trim(self.key, outputs, extent.used)
        return runner.parts(outputs)

    def _body(self, way: Way, view: View) -> Body:
        if not way.made:
            return partial(self.runner.phase.forward, view.batch, view.kwargs)
        made = self.runner.recording(self.key).made
        assert made is not None
        return made(view)

    @contextmanager
    def started(self, sample: Sample, instead: State | None, *, noisy: bool) -> Iterator[State]:
        """The same state and random numbers for every run, and afterwards what was there before."""
        held = [tensor.clone() for tensor in self.memory]
        preserve = self.runner.phase.preserve
        with ExitStack() as stack:
            stack.enter_context(generators_restored(self.runner.device))
            if self._python is not None:
                stack.enter_context(self._python.kept())
            kept = stack.enter_context(preserve(sample.batch)) if preserve is not None else None
            self._seed_generators()
            state = self.elements | named_state(kept)
            try:
                if noisy:
                    self._make_noise()
                for name, value in (instead or {}).items():
                    state[name].copy_(value)
                yield state
            finally:
                for tensor, before in zip(self.memory, held, strict=True):
                    tensor.copy_(before)

    def _make_noise(self) -> None:
        """Numbers around 1 in the place of floating-point state: safe as a divisor, under a root, and as an index."""
        numbers = torch.Generator().manual_seed(self.seed)
        for tensor in self.elements.values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=numbers) + 0.5
                tensor.copy_(torch.where(tensor.isfinite(), noise.to(tensor), tensor))

    def _seed_generators(self) -> None:
        # torch.manual_seed would seed every kind of device that torch knows, and keep a stack trace for each.
        torch.default_generator.manual_seed(self.seed)
        self.runner.device.seed(self.seed)

    def _next_draw(self) -> torch.Tensor:
        on = self.runner.device.torch_device
        return torch.cat([torch.rand(2), torch.rand(2, device=on).cpu()])


@dataclass(frozen=True)
class _Raised:
    """An exception in place of a result."""

    error: Exception


class _Watching:
    """What is watched while the body runs: writes to state and inputs, and reads of what graphs leave out."""

    def __init__(self, state: Callable[[], AbstractContextManager[object]], trial: Trial, *, refuses: bool) -> None:
        self._state = state
        self._trial = trial
        self._refuses = refuses
        self._stack = ExitStack()
        self._inputs: dict[str, torch.Tensor] = {}
        self._reads: ReadsOfLeftOut | None = None

    def prepared(self, now: Current, batch: Any, kwargs: Mapping[str, Any], without: frozenset[str]) -> Current:
        """Note the inputs of the run; returns what is current in it."""
        phase = self._trial.runner.phase
        self._inputs = phase.inputs(batch, kwargs, without)
        if phase.without and without == phase.without:
            given = phase.inputs(batch, kwargs, frozenset())
            self._reads = ReadsOfLeftOut({name: given[name] for name in phase.without if name in given})
            return self._reads.current(now)
        return now

    def __enter__(self) -> None:
        self._stack.enter_context(self._state())
        if self._refuses:
            self._stack.enter_context(refusing_input_writes(self._inputs))
        if self._reads is not None:
            self._stack.enter_context(self._reads.watching())

    def __exit__(self, *error: Any) -> None:
        try:
            self._stack.__exit__(*error)
        finally:
            if self._reads is not None:
                self._trial.left_out_read = self._trial.left_out_read or self._reads.problem


def same_memory(runner: Runner, sample: Sample) -> str:
    """The slots for which a sample has one tensor, in a sentence; empty where there are none."""
    given = runner.phase.inputs(sample.batch, sample.kwargs, frozenset())
    places = {name: tensor.data_ptr() for name, tensor in given.items() if tensor.numel()}
    alike = [repr(name) for name, place in places.items() if list(places.values()).count(place) > 1]
    if not alike:
        return ""
    return (
        f". The sample has one tensor for the slots {' and '.join(alike)}: eagerly, each sees what is written to both"
    )


def _at(frame: Any) -> str:
    return f" ({frame})" if frame is not None else ""
