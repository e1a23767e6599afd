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
from weakref import WeakSet

import torch

from phonograph.devices.base import Capabilities, DeviceGraph, Hardware, MemoryFigures, MemoryPool, Recorder
from phonograph.devices.capturing import said_to_capture
from phonograph.devices.emulated_tape import EmulatedPool, EmulatedTape, fill_with
from phonograph.devices.nodes import NodeList
from phonograph.devices.op_trace import OpTrace
from phonograph.devices.refused import Refused, RefusingOps, refusing
from phonograph.devices.trace import Refusals, forget_modes, uncompiled
from phonograph.errors import DeviceError


class EmulatedGraph:
    """A tape that can be replayed."""

    def __init__(self, tape: EmulatedTape, pool: EmulatedPool) -> None:
        self._tape: EmulatedTape | None = tape
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
        self._tape: EmulatedTape | None = None
        self._modes = ExitStack()
        self._refused = Refused()
        self._random_state = torch.get_rng_state()
        self._num_ended = 0

    def num_nodes(self) -> int:
        return self._num_ended + (len(self._tape.ops) if self._tape is not None else 0)

    def begin(self) -> None:
        if self._tape is not None:
            raise DeviceError("beginning a graph while one is being recorded. End the first, or abort it.")
        self._tape = EmulatedTape(recording=self)
        self._random_state = torch.get_rng_state()
        refused = self._refused = Refused()
        self._modes.enter_context(said_to_capture(refused))
        self._modes.enter_context(uncompiled())
        self._modes.enter_context(Refusals("cpu", refused.note))
        self._modes.enter_context(RefusingOps(self._tape.on_op, refused))

    def end(self) -> DeviceGraph:
        tape = self._close()
        self._refused.check()
        self._num_ended += len(tape.ops) + 1
        self._pool.tapes.append(tape)
        self._pool.wrote(self)
        with torch.inference_mode():
            for tensor in tape.made.values():
                fill_with(tensor, 0)
        return EmulatedGraph(tape, self._pool)

    def abort(self) -> None:
        if self._tape is not None:
            self._close()
        forget_modes()

    def _close(self) -> EmulatedTape:
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
        self._refused = Refused()

    def begin(self) -> None:
        self._refused = Refused()
        self._modes.enter_context(said_to_capture(self._refused))
        self._modes.enter_context(refusing("cpu", self._refused))

    def end(self) -> DeviceGraph:
        self._modes.close()
        self._refused.check()
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
