"""breakable: graphs between breaks, eager code with the live batch in the gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.devices import Device, DeviceGraph, MemoryPool, Recorder
from phonograph.devices.trace import user_frame
from phonograph.errors import BreakError, Frame, OutputError
from phonograph.graphs.inputs.tree import Marker, Noted, TreePath, leaves, map_leaves, reachable
from phonograph.graphs.phases.context import current, entering, unbroken
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.live_arguments import shown
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends.arguments import Args, Arguments, Kwargs, argument_tensors, note_objects
from phonograph.graphs.recording.backends.base import (
    BackendOptions,
    Bind,
    Body,
    RecordedGap,
    Recording,
    ReplayStep,
    ViewBody,
    Views,
    WarmUp,
    as_it_is,
)
from phonograph.graphs.recording.backends.gap_watch import GapWatch, Modes, is_unshared

_ONLY = TreePath(())


class _Fresh(Marker):
    """A tensor that a gap makes anew."""

    def __init__(self, like: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device


class _Same(Marker):
    """A tensor argument that a gap hands back, written in place or not at all."""

    def __init__(self, position: int) -> None:
        self.position = position


@dataclass(frozen=True)
class _GapSpec:
    """Arguments and results of one gap in the last warm-up, with a description of every tensor that it returned."""

    name: str
    result: Any
    objects: Noted
    """The objects among its arguments."""


class _Rehearsing:
    """Runs gaps with host reads allowed, and notes what they return."""

    def __init__(self, recorder: Recorder, active: bool) -> None:
        self._recorder = recorder
        self._active = active
        self.watch = GapWatch()
        self.gaps: list[_GapSpec] = []

    def gap(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if self._active:
            self._recorder.end()
        objects = note_objects(args, kwargs)
        with unbroken():
            now, named = shown((args, kwargs))
            with self.watch.call(function, _name(function), (now, named)):
                result = function(*now, **named)
        tensors = argument_tensors(args, kwargs)
        if not is_unshared(result) or _shares_memory(result, tensors):
            self.watch.hand_out(_name(function), result, lambda one: any(_is_same(one, other) for other in tensors))
        self.gaps.append(_GapSpec(_name(function), _described(result, tensors, _name(function)), objects))
        on_gap = current().on_gap
        if on_gap is not None:
            on_gap(function, args, kwargs, result)
        if self._active:
            self._recorder.begin()
        return result


class _Capturing:
    """Ends the graph before a gap, runs the gap on what the graph computes, and begins the next graph."""

    def __init__(self, device: Device, pool: MemoryPool, recorder: Recorder, expected: list[_GapSpec]) -> None:
        self._device = device
        self._pool = pool
        self._recorder = recorder
        self._expected = expected
        self._num_gaps = 0
        batch = (leaf for _, leaf in reachable(current().batch) if isinstance(leaf, torch.Tensor))
        self._inputs = {tensor.untyped_storage()._cdata for tensor in batch}
        self._modes = Modes.of(device.torch_device)
        self.steps: list[ReplayStep] = []
        self.graphs: list[DeviceGraph] = []
        self.gaps: list[RecordedGap] = []

    def gap(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        spec = self._next_spec(function)
        tensors = argument_tensors(args, kwargs)

        def home(path: TreePath, leaf: Any) -> Any:
            # Made by the segment before the gap, so that the pool reuses it like any intermediate.
            if isinstance(leaf, _Fresh):
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return tensors[leaf.position] if isinstance(leaf, _Same) else leaf

        outputs = map_leaves(spec.result, home)
        self.close_segment()
        arguments = Arguments.of(args, kwargs, spec.objects, self._of_graph, spec.name)
        handed_back = frozenset(path for path, leaf in leaves(spec.result) if isinstance(leaf, _Same))
        modes = Modes.of(self._device.torch_device)
        called = function if modes == self._modes else modes.around(function)
        line = user_frame()
        gap = _Gap(called, arguments, map_leaves(outputs, self._weak), spec.name, handed_back, line)
        with unbroken():
            gap.run()
        self.steps.append(gap.run)
        self.gaps.append(RecordedGap(function, spec.name, line, arguments.now, gap.outputs))
        self._recorder.begin()
        return outputs

    def close_segment(self) -> None:
        """End the graph and run it: recording does not, and the gap after it needs its values."""
        graph = self._recorder.end()
        graph.replay()
        self.graphs.append(graph)
        self.steps.append(graph.replay)

    def _next_spec(self, function: Callable[..., Any]) -> _GapSpec:
        index, self._num_gaps = self._num_gaps, self._num_gaps + 1
        if index >= len(self._expected) or self._expected[index].name != _name(function):
            found = _name(function)
            raise BreakError(
                f"capture reaches gap {index + 1} ({found}), which the warm-up of this shape did not. "
                "A break must not depend on values that change between runs."
            )
        return self._expected[index]

    def _weak(self, path: TreePath, leaf: Any) -> Any:
        return self._device.weak(leaf) if isinstance(leaf, torch.Tensor) and self._pool.owns(leaf) else leaf

    def _of_graph(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A weak tensor over pool memory, or an input's buffer; None for memory from outside."""
        if self._pool.owns(tensor):
            return self._device.weak(tensor)
        return tensor if tensor.untyped_storage()._cdata in self._inputs else None


@dataclass(frozen=True)
class _Gap:
    """An eager call between two graphs, and where the next graph reads its outputs."""

    function: Callable[..., Any]
    arguments: Arguments
    outputs: Any
    name: str
    handed_back: frozenset[TreePath]
    """Where it returned an argument: that memory is not the gap's to write."""
    called: Frame | None = None
    """The user's line that calls it."""

    def run(self) -> None:
        args, kwargs = self.arguments.now()
        result = self.function(*args, **kwargs)
        if result is None and self.outputs is None:
            return
        if isinstance(self.outputs, torch.Tensor):
            self._write(_ONLY, self.outputs, result)
            return
        homes = dict(leaves(self.outputs))
        found = dict(_opened(result, self.name))
        if homes.keys() != found.keys():
            raise self._error(
                f"gap {self.name} returned the parts {[*map(str, found)]}, at capture {[*map(str, homes)]}",
                "A gap must return the same structure every time.",
            )
        written: dict[int, Any] = {}
        for path, home in homes.items():
            if written.setdefault(id(home), found[path]) is not found[path] and isinstance(home, torch.Tensor):
                raise self._error(
                    f"gap {self.name}, output {path}: returned two tensors where it returned one tensor twice at "
                    "capture",
                    "A gap must return the same structure every time.",
                )
            self._write(path, home, found[path])

    def _write(self, path: TreePath, home: Any, value: Any) -> None:
        where = f"gap {self.name}{f', output {path}' if path else ''}"
        if isinstance(home, torch.Tensor):
            if not isinstance(value, torch.Tensor) or value.shape != home.shape or value.dtype != home.dtype:
                raise self._error(
                    f"{where}: returned {_describe(value)}, the next graph reads {_describe(home)}",
                    "A gap must return the same shapes every time; return padded rows as it got them.",
                )
            if value.data_ptr() != home.data_ptr() or value.stride() != home.stride():
                if path in self.handed_back and value.numel():
                    raise self._error(
                        f"{where}: returned another tensor than its argument, which it returned at capture, and the "
                        "next graph reads that argument",
                        "Write the result into it, or return a new tensor every time (argument.clone()).",
                    )
                home.copy_(value)
        elif value is not home and value != home:
            raise self._error(
                f"{where}: returned {value!r}, at capture {home!r}, and the next graph has that value frozen in",
                "Return it as a tensor.",
            )

    def _error(self, problem: str, remedy: str) -> BreakError:
        now = current()
        line = f" ({self.called})" if self.called is not None else ""
        return BreakError(f"{now.stage.value} {now.phase}: {problem}{line}. {remedy}")


class BreakableBackend:
    """Records graphs between breaks; without a break it is `full`."""

    name = "breakable"
    is_exact = True
    records_body = True
    notes: Sequence[str] = ()

    def __init__(self, device: Device, pool: MemoryPool, options: BackendOptions = BackendOptions()) -> None:
        self._device = device
        self._pool = pool
        self._gaps: dict[ShapeKey, list[_GapSpec]] = {}

    def prepare(self, body: ViewBody, views: Views, progress: Progress = silent) -> Bind:
        return as_it_is(body)

    def program_of(self, key: ShapeKey) -> int:
        return -1

    def rounds_in(self, key: ShapeKey) -> None:
        return None

    def warm_up(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        rehearse = warm_up is not WarmUp.FREE
        with self._device.rehearsal(named=warm_up is WarmUp.DIAGNOSIS) as rehearsal:
            breaker = _Rehearsing(rehearsal, active=rehearse)
            if rehearse:
                rehearsal.begin()
            with _breaking(breaker):
                outputs = body()
            breaker.watch.check_body()
            if rehearse:
                rehearsal.end()
        self._gaps[key] = breaker.gaps
        return outputs

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        with self._device.recorder(self._pool) as recorder:
            breaker = _Capturing(self._device, self._pool, recorder, self._gaps.pop(key))
            recorder.begin()
            with _breaking(breaker):
                outputs = body()
            breaker.close_segment()
        has_gaps = len(breaker.steps) > 1
        return Recording(breaker.steps, outputs, breaker.graphs, has_gaps, breaker.gaps)


@contextmanager
def _breaking(breaker: _Rehearsing | _Capturing) -> Iterator[None]:
    with entering(replace(current(), breaker=breaker)):
        yield


def _opened(result: Any, gap: str) -> Iterator[tuple[TreePath, Any]]:
    """The leaves of what a gap returned."""
    try:
        yield from leaves(result)
    except OutputError as error:
        raise BreakError(f"gap {gap}: {error}") from None


def _described(result: Any, tensors: Sequence[torch.Tensor], gap: str) -> Any:
    """The result with a description in the place of every tensor; these are the arguments'."""

    def describe(path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for position, tensor in enumerate(tensors):
            if _is_same(leaf, tensor):
                return _Same(position)
        return _Fresh(leaf)

    try:
        return map_leaves(result, describe)
    except OutputError as error:
        raise BreakError(f"gap {gap}: {error}") from None


def _shares_memory(result: Any, tensors: Sequence[torch.Tensor]) -> bool:
    held = {tensor.untyped_storage()._cdata for tensor in tensors}
    return isinstance(result, torch.Tensor) and result.untyped_storage()._cdata in held


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_memory = one.data_ptr() == other.data_ptr() and one.numel() > 0
    return one is other or (
        same_memory and one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    )


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
