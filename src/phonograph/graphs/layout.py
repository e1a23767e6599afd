"""Where the slots of one padded extent lie in memory, worked out once so that a load is only copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from phonograph.devices import Device, Fence
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.fields import Path
from phonograph.graphs.pool import Lease, next_power_of_two
from phonograph.graphs.slots import Slot

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 64
_RING_BLOCKS = 3
_MAX_FITS = 512
_PACKED_ROW_BYTES = 256


def is_packed(slot: Slot) -> bool:
    """Whether a slot lies in the block that one transfer fills: index-like ones, and small rows of floats."""
    if slot.place == "host" or numpy_dtype(slot.dtype) is None:
        return False
    row = slot.dtype.itemsize
    for size in slot.shape:
        row *= size if isinstance(size, int) else 1
    return not slot.dtype.is_floating_point or row <= _PACKED_ROW_BYTES


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """numpy's name for a torch dtype, or None (bfloat16, float8 …)."""
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError:
        return None


@dataclass(eq=False)
class HostBlock:
    """One block of the ring: written by the host, read by a transfer, written again once that has passed."""

    tensor: torch.Tensor
    array: Array
    fence: Fence


class Memory(Protocol):
    """The buffers of one path."""

    def block(self, num_bytes: int) -> torch.Tensor:
        """Device memory for the packed slots."""
        ...

    def flat(self, slot: Slot, num_elements: int) -> torch.Tensor:
        """Memory for a slot that is not packed."""
        ...


class LeasedMemory:
    """Memory from a pool: fixed, since graphs are captured over it."""

    def __init__(self, block: Lease, flats: Mapping[str, Lease]) -> None:
        self._block = block
        self._flats = flats

    def block(self, num_bytes: int) -> torch.Tensor:
        return self._block.tensor[:num_bytes]

    def flat(self, slot: Slot, num_elements: int) -> torch.Tensor:
        return self._flats[slot.name].tensor[:num_elements]


class GrowingMemory:
    """Memory that no graph holds: it grows to the next power of two."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def block(self, num_bytes: int) -> torch.Tensor:
        return self._grown("", num_bytes, torch.uint8, self._device.torch_device)

    def flat(self, slot: Slot, num_elements: int) -> torch.Tensor:
        device = torch.device("cpu") if slot.place == "host" else self._device.torch_device
        return self._grown(slot.name, num_elements, slot.dtype, device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        storage = tensor.untyped_storage()._cdata
        return any(held.untyped_storage()._cdata == storage for held in self._tensors.values())

    def _grown(self, name: str, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        held = self._tensors.get(name)
        if held is None or held.numel() < num_elements:
            with torch.inference_mode(False):
                held = torch.zeros(next_power_of_two(num_elements), dtype=dtype, device=device)
            self._tensors[name] = held
        return held[:num_elements]


class Cell:
    """One slot in one layout: its padded view, and the same place in each block of the host ring."""

    def __init__(self, slot: Slot, view: torch.Tensor, arrays: Sequence[Array]) -> None:
        self.slot = slot
        self.path: Path = tuple(slot.field.split("."))
        self.view = view
        self.arrays = arrays


class Fit:
    """A cell for one used size: what to write where, with every slice taken already."""

    def __init__(self, cell: Cell, used: Mapping[str, int]) -> None:
        slot = cell.slot
        self.slot = slot
        self.path = cell.path
        self.cell = cell
        self.shape = slot.sizes(used)
        region = tuple(slice(0, size) for size in self.shape)
        tails = _tails(self.shape, tuple(cell.view.shape))
        self.view = cell.view
        self.used = cell.view[region] if region else cell.view
        self.tails = [cell.view[tail] for tail in tails]
        self.arrays = [array[region] if region else array for array in cell.arrays]
        self.array_tails = [[array[tail] for tail in tails] for array in cell.arrays]
        assert slot.pad is not None
        self.fill = slot.pad.value
        self.num_bytes = self.used.numel() * self.used.element_size()

    @property
    def packed(self) -> bool:
        return bool(self.arrays)


def _tails(used: tuple[int, ...], padded: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Disjoint regions that, with the used one, make up the padded shape."""
    regions = []
    for axis, (inner, outer) in enumerate(zip(used, padded, strict=True)):
        if inner < outer:
            before = tuple(slice(0, size) for size in used[:axis])
            after = tuple(slice(0, size) for size in padded[axis + 1 :])
            regions.append((*before, slice(inner, outer), *after))
    return regions


class Layout:
    """All slots at one padded extent: tight, each view contiguous, packed slots in one block."""

    def __init__(
        self,
        slots: Sequence[Slot],
        dims: Mapping[str, Dim],
        padded: Mapping[str, int],
        memory: Memory,
        ring: HostRing,
        adopted: Mapping[str, torch.Tensor],
    ) -> None:
        self.padded = dict(padded)
        self._fits: dict[tuple[int, ...], list[Fit]] = {}
        offsets, self.num_bytes = packed_offsets(slots, padded, adopted)
        block = memory.block(self.num_bytes) if self.num_bytes else None
        blocks = ring.at_least(self.num_bytes)
        self.block = block
        self.host = [host.tensor[: self.num_bytes] for host in blocks]
        self.cells: list[Cell] = []
        for slot in slots:
            shape = slot.sizes(padded)
            if slot.name in offsets and block is not None:
                offset, num_bytes = offsets[slot.name]
                view = block[offset : offset + num_bytes].view(slot.dtype).view(shape)
                kind = numpy_dtype(slot.dtype)
                arrays = [host.array[offset : offset + num_bytes].view(kind).reshape(shape) for host in blocks]
                self.cells.append(Cell(slot, view, arrays))
            elif slot.name in adopted:
                self.cells.append(Cell(slot, adopted[slot.name][tuple(slice(0, size) for size in shape)], ()))
            else:
                num_elements = _product(shape)
                self.cells.append(Cell(slot, memory.flat(slot, num_elements).view(shape), ()))
        self.sizes = {(dim.field,): padded[name] for name, dim in dims.items() if dim.field}

    def fits(self, used: Mapping[str, int]) -> list[Fit]:
        """The cells with every slice for these used sizes; made once and kept."""
        key = tuple(used.values())
        fits = self._fits.get(key)
        if fits is None:
            if len(self._fits) >= _MAX_FITS:
                self._fits.clear()
            fits = self._fits[key] = [Fit(cell, used) for cell in self.cells]
        return fits


class HostRing:
    """Host blocks that transfers read from, used in turn so that the host need not wait for the last one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: list[HostBlock] = []
        self._next = 0
        self._num_bytes = 0

    def at_least(self, num_bytes: int) -> list[HostBlock]:
        """The ring's blocks, replaced by larger ones where they are too small."""
        if num_bytes > self._num_bytes or not self._blocks:
            self._num_bytes = next_power_of_two(num_bytes)
            self._blocks = [self._new_block() for _ in range(_RING_BLOCKS)]
        return self._blocks

    def take(self) -> tuple[int, Fence]:
        """The next block's number and its fence, after the transfer that last read it has passed."""
        self._next = (self._next + 1) % _RING_BLOCKS
        fence = self._blocks[self._next].fence
        fence.synchronize()
        return self._next, fence

    def _new_block(self) -> HostBlock:
        with torch.inference_mode(False):
            tensor = self._device.host_block(self._num_bytes)
        return HostBlock(tensor, tensor.numpy(), self._device.fence())


def packed_offsets(
    slots: Sequence[Slot], padded: Mapping[str, int], adopted: Mapping[str, torch.Tensor]
) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each packed slot lies in the block (offset, bytes), and the block's size."""
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for slot in slots:
        if is_packed(slot) and slot.name not in adopted:
            num_bytes = _product(slot.sizes(padded)) * slot.dtype.itemsize
            offsets[slot.name] = (end, num_bytes)
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def extent_of(used: Mapping[str, int], padded: Mapping[str, int] | None = None) -> Extent:
    """An extent; unpadded where no padded sizes are given."""
    return Extent(dict(used), dict(padded if padded is not None else used))
