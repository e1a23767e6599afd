"""Emulated device: device-graph semantics on the CPU, so that everything above it is tested without a GPU.

Recording runs each aten op once and writes it down; replay runs the same ops into the same memory.
As on a real device, recording has no effect outside the graph: what it wrote to tensors from outside
is put back at the end, its own intermediates hold nothing until the first replay, and they belong to
the pool, whose other graphs may overwrite them. Streams, events, collectives and Triton kernels are
not emulated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch

from phonograph.devices.base import Capabilities, DeviceGraph, Hardware, MemoryFigures, MemoryPool, Recorder
from phonograph.devices.capturing import said_to_capture
from phonograph.devices.nodes import Node, NodeList
from phonograph.devices.op_trace import OpTrace, argument_names, op_name
from phonograph.devices.trace import (
    OpWatch,
    Refusals,
    forget_modes,
    refusal,
    refusing,
    tensors_in,
    uncompiled,
    user_frame,
    written_tensors,
)
from phonograph.errors import CaptureError, DeviceError

aten = torch.ops.aten

# Their result is undefined memory: a replay leaves it as it is.
_UNDEFINED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

_NO_DERIVATIVES = "Compute derivatives outside, or mark the function @graph_break and use backend='breakable'"


@dataclass(frozen=True)
class _Op:
    func: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]
    fresh: tuple[tuple[int, torch.Tensor], ...]
    """Position among the op's results, and the memory that keeps that result's address."""
    number: complex | None = None
    """The value that it writes, where that is a host constant."""

    def run(self) -> None:
        results = list(tensors_in(self.func(*self.args, **self.kwargs)))
        for position, kept in self.fresh:
            kept.copy_(results[position])

    def node(self, trace: OpTrace, pool: EmulatedPool) -> Node:
        """As a node; `trace` numbers memory across all ops of a graph, since addresses in the pool don't matter."""
        given = [*zip(argument_names(self.func), self.args, strict=False), *self.kwargs.items()]
        noted = [(name, trace.note(value)) for name, value in given if self.number is None or name == "self"]
        addresses = [
            (f"address of {name}", value.data_ptr())
            for name, value in given
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not pool.owns(value)
        ]
        if self.number is not None:
            addresses = []
        trace.made([kept for _, kept in self.fresh])
        return Node("op", op_name(self.func), arguments=(*noted, *addresses, ("number", self.number)))


@dataclass(eq=False)
class _Tape:
    """The ops between one `begin` and its `end`, and the memory that they made."""

    recording: object
    ops: list[_Op] = field(default_factory=list)
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)

    def on_op(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        error = refusal(func, args, kwargs, "cpu")
        if error is not None:
            raise error
        for tensor in written_tensors(func, args, kwargs):
            self._save(tensor)
        result = func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._constant(result)
        before = {_storage_id(t) for t in tensors_in((args, kwargs))}
        fresh = [(i, t) for i, t in enumerate(tensors_in(result)) if _storage_id(t) not in before]
        if any(tensor._is_zerotensor() for _, tensor in fresh):
            problem = "makes zeros without memory (a tangent of torch.func.jvp, a gradient)"
            raise CaptureError(f"{func} {problem}", _NO_DERIVATIVES, op=str(func), frame=user_frame())
        for _, tensor in fresh:
            self.made.setdefault(_storage_id(tensor), tensor)
        # A view of memory that keeps its address needs no replay; a write or a fresh result does.
        if (fresh or func._schema.is_mutable) and not _is_undefined_or_view(func):
            kept = tuple((i, t.detach()) for i, t in fresh)
            self.ops.append(_Op(func, _aliases(args), _aliases(kwargs), kept))
        return result

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor made from a Python number: memory of its own, set to that number at every replay."""
        made, kept = value.clone(), value.clone()
        self.made.setdefault(_storage_id(made), made)
        number = kept.item() if kept.numel() == 1 else None
        self.ops.append(_Op(aten.copy_.default, (made.detach(), kept), {}, (), number))
        return made

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made and storage._cdata not in self.saved:
            self.saved[storage._cdata] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.made.values())

    def undo(self) -> None:
        """Restore memory from outside that recording wrote to."""
        for storage, content in self.saved.values():
            storage.copy_(content)
        self.saved.clear()


def _is_undefined_or_view(func: Any) -> bool:
    return func in _UNDEFINED or torch.Tag.inplace_view in func.tags


def _aliases(value: Any) -> Any:
    """The arguments with tensors of their own: an in-place view op (`squeeze_`) changes the shape of the user's."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(_aliases(item) for item in value)
    if isinstance(value, dict):
        return {key: _aliases(item) for key, item in value.items()}
    return value


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class EmulatedPool:
    """The tapes whose memory a real device would overlay."""

    def __init__(self, *, poison: bool) -> None:
        self.poisons = poison
        self.tapes: list[_Tape] = []
        self._poisoned: dict[object, int] = {}
        """By recording: the pattern that all its memory has. Only its own replay writes there."""

    def owns(self, tensor: torch.Tensor) -> bool:
        return any(_storage_id(tensor) in tape.made for tape in self.tapes)

    def wrote(self, recording: object) -> None:
        """One of its tapes runs, or was made."""
        self._poisoned.pop(recording, None)

    def poison(self, pattern: int) -> None:
        self.poison_all_but(None, pattern)

    def poison_all_but(self, recording: object, pattern: int = 0) -> None:
        others = {tape.recording for tape in self.tapes} - {recording}
        fresh = {one for one in others if self._poisoned.get(one) != pattern}
        for tape in self.tapes:
            if tape.recording in fresh:
                for tensor in tape.made.values():
                    _poison(tensor, pattern)
        self._poisoned = dict.fromkeys(others, pattern)


def _poison(tensor: torch.Tensor, pattern: int) -> None:
    """Fill a tensor's whole storage with a finite value that is unlikely to be right."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if tensor.dtype == torch.bool:
        flat.fill_(bool(pattern))
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        flat.fill_((-191.0, 223.0)[pattern])
    else:
        flat.fill_((0, 1)[pattern])


class EmulatedGraph:
    """A tape that can be replayed."""

    def __init__(self, tape: _Tape, pool: EmulatedPool) -> None:
        self._tape: _Tape | None = tape
        self._pool = pool

    def replay(self) -> None:
        if self._tape is None:
            raise DeviceError("replaying a graph that was released. Capture it again.")
        # The caller's modes took effect when the ops were recorded.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            self._pool.wrote(self._tape.recording)
            if self._pool.poisons:
                self._pool.poison_all_but(self._tape.recording)
            for op in self._tape.ops:
                op.run()

    def nodes(self) -> NodeList:
        """Its ops; what they made is numbered in order."""
        if self._tape is None:
            raise DeviceError("the graph was released")
        trace = OpTrace()
        with torch.inference_mode():
            return NodeList(tuple(op.node(trace, self._pool) for op in self._tape.ops))

    def release(self) -> None:
        if self._tape is not None:
            self._pool.tapes.remove(self._tape)
            self._tape = None


class _EmulatedRecorder:
    def __init__(self, pool: EmulatedPool) -> None:
        self._pool = pool
        self._tape: _Tape | None = None
        self._modes = ExitStack()
        self._random_state = torch.get_rng_state()
        self._num_ended = 0

    def num_nodes(self) -> int:
        return self._num_ended + (len(self._tape.ops) if self._tape is not None else 0)

    def begin(self) -> None:
        if self._tape is not None:
            raise DeviceError("beginning a graph while one is being recorded. End the first, or abort it.")
        self._tape = _Tape(recording=self)
        self._random_state = torch.get_rng_state()
        self._modes.enter_context(said_to_capture())
        self._modes.enter_context(uncompiled())
        self._modes.enter_context(Refusals("cpu"))
        self._modes.enter_context(OpWatch(self._tape.on_op))

    def end(self) -> DeviceGraph:
        tape = self._close()
        self._num_ended += len(tape.ops) + 1
        self._pool.tapes.append(tape)
        self._pool.wrote(self)
        with torch.inference_mode():
            for tensor in tape.made.values():
                _poison(tensor, 0)
        return EmulatedGraph(tape, self._pool)

    def abort(self) -> None:
        if self._tape is not None:
            self._close()
        forget_modes()

    def _close(self) -> _Tape:
        tape, self._tape = self._tape, None
        if tape is None:
            raise DeviceError("ending a graph that was not begun. Call begin() first.")
        # Inference mode is entered after the modes are left: on exit it restores the dispatch keys it found.
        self._modes.close()
        with torch.inference_mode():
            tape.undo()
        torch.set_rng_state(self._random_state)
        return tape


class _EmulatedRehearsal:
    """Refuses between `begin` and `end`; records nothing."""

    def __init__(self) -> None:
        self._modes = ExitStack()
        self._refused: list[CaptureError] = []

    def begin(self) -> None:
        self._modes.enter_context(said_to_capture())
        self._refused = self._modes.enter_context(refusing("cpu"))

    def end(self) -> DeviceGraph:
        self._modes.close()
        if self._refused:
            raise self._refused[0]  # the body caught it, and a recording would hold what it does then
        return NoGraph()

    def abort(self) -> None:
        self._modes.close()
        forget_modes()


class NoGraph:
    """What a rehearsal records."""

    def replay(self) -> None:
        return None

    def release(self) -> None:
        return None


class HostFence:
    """The CPU runs in order: a fence is reached as soon as it is recorded."""

    def __init__(self) -> None:
        self._passed = 0.0

    def record(self) -> None:
        self._passed = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def seconds_since(self, earlier: HostFence) -> float:
        return self._passed - earlier._passed


class EmulatedDevice:
    """The CPU with the rules of a device that records graphs.

    `poison=True` overwrites, before a replay, what other recordings left in the pool.
    """

    name = "emulated"
    torch_device = torch.device("cpu")
    capabilities = Capabilities(
        backends=frozenset({"full", "breakable", "tc_piecewise", "disabled"}),
        compilers=frozenset({"eager"}),
        captures_in_function_mode=True,
    )
    hardware = Hardware("cpu")

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        self._pools: WeakSet[EmulatedPool] = WeakSet()
        self._recorder: _EmulatedRecorder | None = None

    def new_pool(self) -> EmulatedPool:
        pool = EmulatedPool(poison=self._poison)
        self._pools.add(pool)
        return pool

    @contextmanager
    def recorder(self, pool: MemoryPool) -> Iterator[Recorder]:
        if not isinstance(pool, EmulatedPool):
            raise DeviceError(
                f"recording on the emulated device: the memory pool is {type(pool).__name__}, expected EmulatedPool. "
                "Make it with this device's new_pool()."
            )
        recorder = self._recorder = _EmulatedRecorder(pool)
        try:
            yield recorder
        finally:
            recorder.abort()
            self._recorder = None

    def num_nodes(self) -> int:
        """The ops of the recording that is made now."""
        return self._recorder.num_nodes() if self._recorder is not None else 0

    @contextmanager
    def rehearsal(self, *, named: bool = True) -> Iterator[Recorder]:
        rehearsal = _EmulatedRehearsal()
        try:
            yield rehearsal
        finally:
            rehearsal.abort()

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory, which the tape keeps anyway; no inference tensor, since gaps write to it."""
        with torch.inference_mode(False):
            alias = torch.empty(0, dtype=tensor.dtype)
            return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def host_block(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fence(self, *, timed: bool = False) -> HostFence:
        return HostFence()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def synchronize(self) -> None:
        return None

    def free_unused(self) -> None:
        return None

    def memory(self) -> MemoryFigures:
        """Bytes that the recordings of this device hold; a real device would overlay them."""
        used = sum(tape.num_bytes for pool in self._pools for tape in pool.tapes)
        return MemoryFigures(used=used, total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
