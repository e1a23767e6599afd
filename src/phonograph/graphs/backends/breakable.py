"""breakable: graphs between breaks, eager code with the live batch in the gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.devices import Device, DeviceGraph, MemoryPool, Recorder
from phonograph.errors import BreakError
from phonograph.graphs.backends.base import Body, Recording, Step, WarmUp
from phonograph.graphs.context import current, entering, unbroken
from phonograph.graphs.decisions import ShapeKey
from phonograph.graphs.tree import leaves, map_leaves

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class _Fresh:
    """A tensor that a gap makes anew. No dataclass, which would be walked into."""

    def __init__(self, like: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device


class _Same:
    """A tensor argument that a gap hands back, written in place or not at all."""

    def __init__(self, position: int) -> None:
        self.position = position


@dataclass(frozen=True)
class _GapSpec:
    """What one gap returned in the last warm-up, with a description for every tensor."""

    name: str
    result: Any


class _Rehearsing:
    """Runs gaps with host reads allowed, and writes down what they return."""

    def __init__(self, recorder: Recorder, active: bool) -> None:
        self._recorder = recorder
        self._active = active
        self.gaps: list[_GapSpec] = []

    def gap(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if self._active:
            self._recorder.end()
        with unbroken():
            result = function(*args, **kwargs)
        self.gaps.append(_GapSpec(_name(function), _described(result, args, kwargs)))
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
        self.steps: list[Step] = []
        self.graphs: list[DeviceGraph] = []

    def gap(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        spec = self._next_spec(function)
        tensors = _argument_tensors(args, kwargs)

        def home(path: str, leaf: Any) -> Any:
            # Made by the segment before the gap, so that the pool reuses it like any intermediate.
            if isinstance(leaf, _Fresh):
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return tensors[leaf.position] if isinstance(leaf, _Same) else leaf

        outputs = map_leaves(spec.result, home)
        self.close_segment()
        gap = _Gap(function, *self._weakened(args, kwargs), self._weak_tree(outputs), spec.name)
        with unbroken():
            gap.run()
        self.steps.append(gap.run)
        self._recorder.begin()
        return outputs

    def close_segment(self) -> None:
        """End the graph; run it, since recording does not, and the code after it needs its values."""
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

    def _weakened(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments, not keeping pool memory from reuse."""
        kept_args = tuple(self._weak(arg) for arg in args)
        return kept_args, {name: self._weak(arg) for name, arg in kwargs.items()}

    def _weak(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._device.weak(value) if self._pool.owns(value) else value
        if type(value) in (tuple, list):
            # A list is copied: the gap sees it as it is here, whatever the body does to it later.
            return type(value)(self._weak(item) for item in value)
        if type(value) is dict:
            return {key: self._weak(item) for key, item in value.items()}
        return value

    def _weak_tree(self, tree: Any) -> Any:
        return map_leaves(tree, lambda _, leaf: self._weak(leaf))


@dataclass(frozen=True)
class _Gap:
    """An eager call between two graphs, and where the next graph reads its outputs."""

    function: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    outputs: Any
    name: str

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        if result is None and self.outputs is None:
            return
        if isinstance(self.outputs, torch.Tensor):
            self._write("", self.outputs, result)
            return
        homes = dict(leaves(self.outputs))
        found = dict(leaves(result))
        if homes.keys() != found.keys():
            raise BreakError(
                f"gap {self.name} returned the parts {sorted(found)}, at capture {sorted(homes)}. "
                "A gap must return the same structure every time."
            )
        for path, home in homes.items():
            self._write(path, home, found[path])

    def _write(self, path: str, home: Any, value: Any) -> None:
        where = f"gap {self.name}{f', output {path}' if path else ''}"
        if isinstance(home, torch.Tensor):
            if not isinstance(value, torch.Tensor) or value.shape != home.shape or value.dtype != home.dtype:
                raise BreakError(
                    f"{where}: returned {_describe(value)}, the next graph reads {_describe(home)}. "
                    "A gap must return the same shapes every time; return padded rows as it got them."
                )
            if value.data_ptr() != home.data_ptr() or value.stride() != home.stride():
                home.copy_(value)
        elif value is not home and value != home:
            raise BreakError(
                f"{where}: returned {value!r}, at capture {home!r}, and the next graph has that value frozen in. "
                "Return it as a tensor."
            )


class BreakableBackend:
    """Records graphs between breaks; without a break it is `full`."""

    name = "breakable"

    def __init__(self, device: Device, pool: MemoryPool) -> None:
        self._device = device
        self._pool = pool
        self._gaps: dict[ShapeKey, list[_GapSpec]] = {}

    def prepare(self, key: ShapeKey, body: Body, warm_up: WarmUp) -> Any:
        rehearse = warm_up is not WarmUp.FREE
        with self._device.rehearsal(named=warm_up is WarmUp.DIAGNOSIS) as rehearsal:
            breaker = _Rehearsing(rehearsal, active=rehearse)
            if rehearse:
                rehearsal.begin()
            with _breaking(breaker):
                outputs = body()
            if rehearse:
                rehearsal.end()
        self._gaps[key] = breaker.gaps
        return outputs

    def capture(self, key: ShapeKey, body: Body) -> Recording:
        with self._device.recorder(self._pool) as recorder:
            breaker = _Capturing(self._device, self._pool, recorder, self._gaps[key])
            recorder.begin()
            with _breaking(breaker):
                outputs = body()
            breaker.close_segment()
        has_gaps = len(breaker.steps) > 1
        return Recording(breaker.steps, outputs, breaker.graphs, has_gaps)


@contextmanager
def _breaking(breaker: _Rehearsing | _Capturing) -> Iterator[None]:
    with entering(replace(current(), breaker=breaker)):
        yield


def _described(result: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result with a description in the place of every tensor."""
    tensors = _argument_tensors(args, kwargs)

    def describe(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for position, tensor in enumerate(tensors):
            if _is_same(leaf, tensor):
                return _Same(position)
        return _Fresh(leaf)

    return map_leaves(result, describe)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_memory = one.data_ptr() == other.data_ptr() and one.numel() > 0
    return one is other or (
        same_memory and one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    )


def _argument_tensors(args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
