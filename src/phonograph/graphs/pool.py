"""One allocation per (name, dtype, device) for all runners: plan first, then allocate."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from phonograph.devices import Device, MemoryPool
from phonograph.errors import DeclarationError, LoadError

log = logging.getLogger("phonograph")

Key = tuple[str, torch.dtype, torch.device]


@dataclass(eq=False)
class Lease:
    """One runner's part of an allocation; its memory is there once the pool is sealed."""

    name: str
    num_elements: int
    dtype: torch.dtype
    device: torch.device
    owner: str
    shared: bool = True
    _memory: torch.Tensor | None = None

    @property
    def key(self) -> Key:
        return (self.name, self.dtype, self.device)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_placed(self) -> bool:
        return self._memory is not None

    @property
    def tensor(self) -> torch.Tensor:
        """The flat memory of this lease."""
        if self._memory is None:
            raise DeclarationError(
                f"buffer {self.name!r} of {self.owner} is used before the pool is sealed. Call seal()."
            )
        return self._memory

    def place(self, memory: torch.Tensor) -> None:
        """Give the lease its memory, once: what is captured is never repointed."""
        if self._memory is not None:
            raise DeclarationError(f"buffer {self.name!r} of {self.owner} has its memory already.")
        self._memory = memory[: self.num_elements]


@dataclass(frozen=True)
class PoolReport:
    """What sharing saved."""

    num_leases: int
    num_allocations: int
    bytes_requested: int
    bytes_allocated: int
    private: tuple[str, ...]
    """Leases that share with nobody, with the reason."""

    @property
    def bytes_saved(self) -> int:
        return self.bytes_requested - self.bytes_allocated

    def __str__(self) -> str:
        line = (
            f"{self.num_leases} buffers in {self.num_allocations} allocations: {self.bytes_allocated:,} bytes, "
            f"{self.bytes_saved:,} saved by sharing"
        )
        return "\n".join([line, *(f"  not shared: {reason}" for reason in self.private)])


class BufferPool:
    """Input buffers and graph memory that runners share.

    Sharing is sound because a buffer means something only from its load to the end of that replay.
    The result does not depend on the order in which runners declare their needs.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sealed = False
        self.in_use = threading.Lock()
        """Held by the runner whose load means something right now: it runs, captures, verifies or gives graphs back."""
        self.num_loads = 0
        """Grows with every load for a graph: while it stands still, the buffers hold what the last one left."""
        self._leases: list[Lease] = []
        self._placements: list[Callable[[], None]] = []
        self._private: list[str] = []
        self._allocations: dict[Key, torch.Tensor] = {}
        self._bytes_private = 0

    @cached_property
    def memory(self) -> MemoryPool:
        """Graph memory for the runners of this pool: it serves one call at a time, so their graphs may share it too."""
        return self.device.new_pool()

    @contextmanager
    def using(self, doing: str) -> Iterator[None]:
        """Inside, the buffers are one runner's, which is `doing` this; refused where they are somebody's already."""
        if not self.in_use.acquire(blocking=False):
            raise self.busy(doing)
        try:
            yield
        finally:
            self.in_use.release()

    def busy(self, doing: str) -> LoadError:
        """The error for a runner that finds the buffers in use."""
        return LoadError(
            f"{doing}: its buffers are in use by another call, of another thread or around this one. "
            "Give this runner a BufferPool of its own, or call one after the other."
        )

    def request(self, name: str, num_elements: int, dtype: torch.dtype, device: torch.device, owner: str) -> Lease:
        """Ask for a buffer; before the seal it is shared, after it the caller gets memory of its own."""
        return self._lease(Lease(name, num_elements, dtype, device, owner), self._why_private())

    def share_in(self, target: object, owner: str = "") -> None:
        """Adopt the tensors of a dataclass, namespace or nested dict: at the seal each becomes a pool view in place."""
        owner = owner or type(target).__name__
        found = list(_walk(target, "", ()))
        for path, tensor, put in found:
            reason = self._why_private()
            if tensor.is_inference():
                reason = "made under inference mode, it can't be written outside it"
            lease = self._lease(Lease(path, tensor.numel(), tensor.dtype, tensor.device, owner), reason)
            self._placements.append(_putting(lease, tensor, put))
        if self.sealed:
            self._place()

    def seal(self) -> None:
        """Allocate everything that was asked for; a second call does nothing."""
        if self.sealed:
            return
        largest: dict[Key, int] = {}
        for lease in self._leases:
            if lease.shared:
                largest[lease.key] = max(largest.get(lease.key, 0), lease.num_elements)
        self._allocations = {
            (name, dtype, device): _allocate(num_elements, dtype, device)
            for (name, dtype, device), num_elements in largest.items()
        }
        for lease in self._leases:
            if lease.shared:
                lease.place(self._allocations[lease.key])
        self.sealed = True
        self._place()

    def report(self) -> PoolReport:
        """Bytes asked for, allocated and saved."""
        shared = sum(t.numel() * t.element_size() for t in self._allocations.values())
        return PoolReport(
            num_leases=len(self._leases),
            num_allocations=len(self._allocations) + len(self._private),
            bytes_requested=sum(lease.num_bytes for lease in self._leases if lease.is_placed),
            bytes_allocated=shared + self._bytes_private,
            private=tuple(self._private),
        )

    def _why_private(self) -> str:
        """Why a lease that is asked for now shares with nobody; empty if it shares."""
        if self.sealed:
            return "asked for after the pool was sealed"
        if not self.device.capabilities.shares_buffers:
            return f"the {self.device.name} device does not share buffers"
        return ""

    def _lease(self, lease: Lease, reason: str) -> Lease:
        """Take note of a lease; one with a reason to be private gets its memory now."""
        if reason:
            lease.shared = False
            lease.place(_allocate(lease.num_elements, lease.dtype, lease.device))
            self._bytes_private += lease.num_bytes
            self._private.append(f"{lease.owner}.{lease.name}: {reason}")
            log.info("buffer %s of %s is not shared: %s", lease.name, lease.owner, reason)
        self._leases.append(lease)
        return lease

    def _place(self) -> None:
        for place in self._placements:
            place()
        self._placements.clear()


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Whatever the ambient mode: an inference tensor could not be written outside inference mode.
    with torch.inference_mode(False):
        return torch.zeros(num_elements, dtype=dtype, device=device)


_Put = Callable[[torch.Tensor], None]


def _putting(lease: Lease, tensor: torch.Tensor, put: _Put) -> Callable[[], None]:
    def place() -> None:
        with torch.inference_mode(False), torch.no_grad():
            view = lease.tensor.view(tensor.shape)
            view.copy_(tensor)
        put(view)

    return place


def _walk(target: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor, _Put]]:
    """Every tensor below a container, with its dotted path and the way to replace it."""
    if id(target) in above:
        raise DeclarationError(f"sharing buffers: {path} holds itself. Leave it out.")
    for name, value in _items(target, path):
        where = f"{path}.{name}" if path else str(name)
        if isinstance(value, torch.Tensor):
            yield where, value, _putter(target, name)
        elif value is not None:
            yield from _walk(value, where, (*above, id(target)))


def _items(target: Any, path: str) -> list[tuple[Any, Any]]:
    if isinstance(target, dict):
        return list(target.items())
    if isinstance(target, SimpleNamespace):
        return list(vars(target).items())
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        return [(f.name, getattr(target, f.name, None)) for f in dataclasses.fields(target)]
    raise DeclarationError(
        f"sharing buffers: {path or 'the object'} is a {type(target).__name__}; "
        "tensors, None, dataclasses, namespaces and dicts can be adopted. Leave it out or wrap it."
    )


def _putter(target: Any, name: Any) -> _Put:
    def put(view: torch.Tensor) -> None:
        if isinstance(target, dict):
            target[name] = view
        else:
            object.__setattr__(target, name, view)  # a frozen dataclass is adopted too

    return put


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
