"""Buffer pool: one allocation per (name, dtype, device) for all runners; all leases are planned, then allocated."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from phonograph.devices import Device, MemoryPool
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.inputs.aliases import Aliases, FoundTensor, find_tensors, group_aliases

log = logging.getLogger("phonograph")

Key = tuple[str, torch.dtype, torch.device]


@dataclass(eq=False)
class LoadCount:
    """How often an allocation was written for a graph: while the count is the same, it holds the last load."""

    count: int = 0


@dataclass(eq=False)
class Lease:
    """One runner's part of an allocation; its memory is there once the pool is sealed."""

    name: str
    num_elements: int
    dtype: torch.dtype
    device: torch.device
    owner: str
    shared: bool = True
    loads: LoadCount = field(default_factory=LoadCount)
    """Of the allocation: all leases that share it have the same."""
    _memory: torch.Tensor | None = None

    @property
    def key(self) -> Key:
        return (self.name, self.dtype, self.device)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def tensor(self) -> torch.Tensor:
        """The flat memory of this lease."""
        return self.allocation[: self.num_elements]

    @property
    def allocation(self) -> torch.Tensor:
        """All the memory that this lease is a part of."""
        if self._memory is None:
            raise DeclarationError(
                f"using buffer {self.name!r} of {self.owner} before the pool is sealed. Call seal() first."
            )
        return self._memory

    def place(self, memory: torch.Tensor) -> None:
        """Give the lease its memory, once: what is captured is never repointed."""
        if self._memory is not None:
            raise DeclarationError(
                f"placing buffer {self.name!r} of {self.owner}: it has memory already, which graphs may hold. "
                "Request another buffer."
            )
        self._memory = memory


@dataclass(frozen=True)
class PoolReport:
    """What sharing saved."""

    num_leases: int
    num_allocations: int
    bytes_requested: int
    bytes_allocated: int
    private: tuple[str, ...]
    """Leases that are not shared, with the reason."""

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
    The result does not depend on the order in which runners declare their needs. What is asked for after the seal
    shares where a buffer of its name, dtype and device is large enough: nothing that stands is moved.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sealed = False
        self.in_use = threading.Lock()
        """Held by a runner while it runs, captures, verifies or releases: its load must stay in the buffers."""
        self.num_loads = 0
        """Counts loads for graphs, whichever buffers they write."""
        self.num_adopted_loads = 0
        """Counts loads into tensors that are not leased: these may lie in any runner's buffer."""
        self._loads: dict[Key, LoadCount] = {}
        self.rings: dict[Key, object] = {}
        """Host memory for each shared allocation: one for all runners."""
        self._leases: list[Lease] = []
        self._found: list[FoundTensor] = []
        self._private: list[str] = []
        self._allocations: dict[Key, torch.Tensor] = {}
        self._bytes_private = 0

    @cached_property
    def memory(self) -> MemoryPool:
        """Graph memory for the runners of this pool: it serves one call at a time, so their graphs may share it too."""
        return self.device.new_pool()

    @contextmanager
    def using(self, doing: str) -> Iterator[None]:
        """Hold the buffers for one runner, which is `doing` this; refused while another holds them."""
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

    def request(
        self, name: str, num_elements: int, dtype: torch.dtype, device: torch.device, owner: str, *, shared: bool = True
    ) -> Lease:
        """Ask for a buffer; one that is not to be shared gets memory of its own."""
        lease = Lease(name, num_elements, dtype, device, owner)
        return self._lease(lease, "its slot is declared with shared=False" if not shared else "")

    def share_in(self, target: object, owner: str = "") -> None:
        """Adopt the tensors of a dataclass, namespace or nested dict: at the seal each becomes a pool view in place.

        Fields that show the same memory still do so afterwards.
        """
        owner = owner or type(target).__name__
        found = find_tensors(target, owner)
        if not self.sealed:
            self._found += found
            return
        with self.using(f"sharing in the tensors of {owner}"):
            self._lease_found(found)()

    def seal(self) -> None:
        """Allocate everything that was asked for; a second call does nothing."""
        if self.sealed:
            return
        put_views = self._lease_found(self._found)
        self._found = []
        self._allocations = {key: _allocate(num_elements, *key[1:]) for key, num_elements in self._largest().items()}
        for lease in self._leases:
            if lease.shared:
                lease.place(self._allocations[lease.key])
        self.sealed = True
        put_views()

    def report(self) -> PoolReport:
        """Bytes asked for, allocated and saved; before the seal, as it would be."""
        shared = self._largest()
        return PoolReport(
            num_leases=len(self._leases),
            num_allocations=len(shared) + len(self._private),
            bytes_requested=sum(lease.num_bytes for lease in self._leases),
            bytes_allocated=sum(count * key[1].itemsize for key, count in shared.items()) + self._bytes_private,
            private=tuple(self._private),
        )

    def _largest(self) -> dict[Key, int]:
        """The elements of each shared allocation."""
        largest: dict[Key, int] = {}
        for lease in self._leases:
            if lease.shared:
                largest[lease.key] = max(largest.get(lease.key, 0), lease.num_elements)
        return largest

    def _why_private(self, lease: Lease) -> str:
        """Why a lease that is asked for now is not shared; empty if it is."""
        if not self.device.capabilities.shares_buffers:
            return f"the {self.device.name} device does not share buffers"
        if self.sealed and lease.key not in self._allocations:
            return "asked for after the pool was sealed, and there was no earlier one like it"
        if self.sealed and self._allocations[lease.key].numel() < lease.num_elements:
            return f"asked for after the pool was sealed, with {self._allocations[lease.key].numel():,} elements of it"
        return ""

    def _lease(self, lease: Lease, reason: str = "") -> Lease:
        """Take note of a lease; one with a reason to be private gets its memory now."""
        reason = reason or self._why_private(lease)
        self._leases.append(lease)
        if reason:
            self._keep_private(lease, reason)
            lease.place(_allocate(lease.num_elements, lease.dtype, lease.device))
            return lease
        lease.loads = self._loads.setdefault(lease.key, lease.loads)
        if self.sealed:
            lease.place(self._allocations[lease.key])
        return lease

    def _keep_private(self, lease: Lease, reason: str) -> None:
        lease.shared = False
        self._bytes_private += lease.num_bytes
        self._private.append(f"{lease.owner}.{lease.name}: {reason}")
        log.info("buffer %s of %s is not shared: %s", lease.name, lease.owner, reason)

    def _lease_found(self, found: Sequence[FoundTensor]) -> Callable[[], None]:
        """Lease memory for tensors that were found; the returned function puts views of it in their place."""
        moves: list[tuple[Lease, Aliases]] = []
        for aliases in group_aliases(found):
            root = aliases.root
            lease = Lease(root.path, root.tensor.numel(), root.tensor.dtype, root.tensor.device, root.owner)
            if aliases.tangled:
                self._leases.append(lease)
                self._keep_private(lease, f"partially overlaps the memory of {aliases.tangled}, and stays where it is")
                continue
            by_mode = "made under inference mode, it can't be written outside it" if root.tensor.is_inference() else ""
            moves.append((self._lease(lease, by_mode), aliases))

        def put() -> None:
            for lease, aliases in moves:
                self.num_loads += 1
                lease.loads.count += 1  # what a runner left in a shared buffer is gone
                aliases.move_to(lease.tensor)

        return put


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Whatever the ambient mode: an inference tensor could not be written outside inference mode.
    with torch.inference_mode(False):
        return torch.zeros(num_elements, dtype=dtype, device=device)
