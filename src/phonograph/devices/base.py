"""Device protocol: records into a memory pool, replays, and declares its capabilities."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Capabilities:
    """What the adapter of a device can do; rules and pools read it."""

    backends: frozenset[str]
    """The backends that work on it."""
    compilers: frozenset[str] = frozenset()
    """The compilers of `tc_piecewise` whose code it can record."""
    shares_buffers: bool = True
    """Whether several runners may use one input buffer."""
    captures_in_function_mode: bool = False
    """Whether captures run the body in a TorchFunctionMode, in which torch's own layers leave fused kernels out."""


@dataclass(frozen=True)
class Hardware:
    """The chip of a device, as far as kernels are chosen by it."""

    name: str
    """The vendor's name for it; tuning results are cached under this name."""
    compute_capability: tuple[int, int] | None = None
    """NVIDIA's compute capability; None for other vendors' chips."""

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel may begin before its predecessor has ended (programmatic dependent launch)."""
        return self.compute_capability is not None and self.compute_capability >= (9, 0)


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes on the device, as its driver sees them."""

    used: int
    total: int

    @property
    def free(self) -> int:
        return self.total - self.used


class MemoryPool(Protocol):
    """Memory that the intermediates of several graphs share."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in memory that a recording of this pool allocated."""
        ...

    def poison(self, pattern: int) -> None:
        """Overwrite all pool memory that no replay guarantees; `pattern` picks the value (0 or 1)."""
        ...


class DeviceGraph(Protocol):
    """One recorded, replayable sequence."""

    def replay(self) -> None:
        """Run the sequence again on the current stream, at the same addresses."""
        ...

    def release(self) -> None:
        """Free the graph's resources; it can't be replayed any more."""
        ...


class Recorder(Protocol):
    """Records the graphs of one recording, one after the other, with eager gaps between them."""

    def begin(self) -> None:
        """From here on, work is recorded and not run."""
        ...

    def end(self) -> DeviceGraph:
        """Work is run again; returns what was recorded since `begin`."""
        ...

    def abort(self) -> None:
        """Drop what was recorded since `begin` and leave the device as if it had never begun."""
        ...


class Fence(Protocol):
    """An event in the device's stream of work."""

    def record(self) -> None:
        """Record it: after all work issued so far on the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the device has reached it."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Device time between an earlier fence and this one; both timed, of this device, and reached."""
        ...


class Device(Protocol):
    """An adapter that can record and replay."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def hardware(self) -> Hardware: ...

    def new_pool(self) -> MemoryPool:
        """Memory for graphs that are never replayed at the same time."""
        ...

    def recorder(self, pool: MemoryPool) -> AbstractContextManager[Recorder]:
        """A recorder for one recording, with the streams set up as capture needs them."""
        ...

    def rehearsal(self, *, named: bool = True) -> AbstractContextManager[Recorder]:
        """A recorder that runs everything and records nothing, but refuses what capture would.

        With `named` an error names op and line; without, it may be the runtime's own message.
        """
        ...

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep its pool from reusing it."""
        ...

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from without the host waiting."""
        ...

    def fence(self, *, timed: bool = False) -> Fence:
        """A fence; only timed ones know when they were reached."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the generator that random ops on this device draw from, and no other device's."""
        ...

    def synchronize(self) -> None:
        """Wait on the host for all work of the device."""
        ...

    def free_unused(self) -> None:
        """Return cached, unused memory to the driver."""
        ...

    def memory(self) -> MemoryFigures: ...
