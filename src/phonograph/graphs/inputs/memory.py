"""Buffer memory: backs layouts; leased from a pool and fixed, or growing; and its pinned host blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from phonograph.devices import Device
from phonograph.graphs.inputs.pool import BufferPool, Lease
from phonograph.graphs.inputs.slot import Slot
from phonograph.sizes import next_power_of_two

_RING_BLOCKS = 3


class HostBlock:
    """One block of the ring: written by the host, read by a transfer, rewritten once that is complete."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.tensor = device.host_block(num_bytes)
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = self.tensor.numpy()
        self.fence = device.fence()
        self.padded_for: object = None
        """The steps that wrote it last, if they wrote all of its pad values: the same steps need not do so again."""


class PackedBlock:
    """Device memory for packed slots, and a ring of host blocks to fill it from.

    The blocks are used in turn, so that the host need not wait for the last transfer.
    """

    def __init__(self, device: Device, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.ring = tuple(HostBlock(device, tensor.numel()) for _ in range(_RING_BLOCKS))
        self._last = 0

    def take(self) -> tuple[int, object]:
        """The next host block, once the transfer that last read it is complete: its number, and what padded it.

        Its pad values count as overwritten until they are noted again.
        """
        self._last = (self._last + 1) % len(self.ring)
        block = self.ring[self._last]
        block.fence.synchronize()
        padded_for, block.padded_for = block.padded_for, None
        return self._last, padded_for


class Memory(Protocol):
    """The buffers of one path."""

    @property
    def generation(self) -> int:
        """Changes when memory that was handed out is replaced."""
        ...

    def block(self, num_bytes: int) -> PackedBlock:
        """A block for packed slots, of at least this size."""
        ...

    def flat(self, slot: Slot, num_elements: int) -> torch.Tensor:
        """Memory for a slot that is not packed."""
        ...


class LeasedMemory:
    """Memory from a pool: fixed, since graphs are captured over it."""

    generation = 0

    def __init__(self, pool: BufferPool, block: Lease | None, flats: Mapping[str, Lease]) -> None:
        self._pool = pool
        self._lease = block
        self._flats = flats
        self._block: PackedBlock | None = None

    def block(self, num_bytes: int) -> PackedBlock:
        if self._block is None:
            assert self._lease is not None, f"{num_bytes} bytes of packed slots, and none declared"
            self._block = self._new_block(self._lease)
        return self._block

    def _new_block(self, lease: Lease) -> PackedBlock:
        """Runners that share the memory share one ring too, as large as the largest of them needs."""
        block = self._pool.rings.get(lease.key) if lease.shared else None
        if not isinstance(block, PackedBlock):
            block = PackedBlock(self._pool.device, lease.allocation)
            if lease.shared:
                self._pool.rings[lease.key] = block
        return block

    def flat(self, slot: Slot, num_elements: int) -> torch.Tensor:
        return self._flats[slot.name].tensor[:num_elements]


class GrowingMemory:
    """Memory that no graph holds: it grows to the next power of two."""

    def __init__(self, device: Device) -> None:
        self.generation = 0
        self._device = device
        self._block: PackedBlock | None = None
        self._flats: dict[str, torch.Tensor] = {}

    def block(self, num_bytes: int) -> PackedBlock:
        if self._block is None or self._block.tensor.numel() < num_bytes:
            self._block = PackedBlock(self._device, self._new(num_bytes, torch.uint8, self._device.torch_device))
        return self._block

    def flat(self, slot: Slot, num_elements: int) -> torch.Tensor:
        held = self._flats.get(slot.name)
        if held is None or held.numel() < num_elements:
            place = place_of(slot, self._device)
            held = self._flats[slot.name] = self._new(num_elements, slot.dtype, place)
        return held[:num_elements]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        held = [*self._flats.values(), *([self._block.tensor] if self._block is not None else [])]
        storage = tensor.untyped_storage()._cdata
        return any(one.untyped_storage()._cdata == storage for one in held)

    def _new(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.generation += 1
        return torch.zeros(next_power_of_two(num_elements), dtype=dtype, device=device)


def place_of(slot: Slot, device: Device) -> torch.device:
    """Where the slot's buffer is."""
    return torch.device("cpu") if slot.place == "host" else device.torch_device
