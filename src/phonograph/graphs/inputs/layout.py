"""Layout: where the slots of one padded extent lie in memory, computed once so that a load is only copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from phonograph.errors import LoadError
from phonograph.graphs.inputs.aliases import reach
from phonograph.graphs.inputs.extent import Dim
from phonograph.graphs.inputs.fields import Path, path_of
from phonograph.graphs.inputs.memory import Memory, PackedBlock
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.inputs.values import Array, SlotValues
from phonograph.sizes import round_up

_ALIGNMENT = 64
_MAX_KEPT = 512
_PACKED_ROW_BYTES = 256
_LARGE_BYTES = 1 << 20


def is_packed(slot: Slot) -> bool:
    """Whether a slot lies in the block that one transfer fills: index-like ones, and small rows of floats."""
    if slot.place == "host":
        return False
    row = int(np.prod([size for size in slot.shape if isinstance(size, int)], dtype=np.int64)) * slot.dtype.itemsize
    return not slot.dtype.is_floating_point or row <= _PACKED_ROW_BYTES


def packed_spans(slots: Sequence[Slot], padded: Mapping[str, int]) -> tuple[dict[str, slice], int]:
    """Where each packed slot lies in the block, in bytes, and the bytes of all of them."""
    spans: dict[str, slice] = {}
    end = 0
    for slot in slots:
        if is_packed(slot):
            start = round_up(end, _ALIGNMENT)
            end = start + num_elements(slot, padded) * slot.dtype.itemsize
            spans[slot.name] = slice(start, end)
    return spans, end


def num_elements(slot: Slot, padded: Mapping[str, int]) -> int:
    """How many elements a slot has at a padded extent."""
    return int(np.prod(slot.sizes(padded), dtype=np.int64))


class Cell:
    """One slot in one layout: its padded view, and, if packed, the same place in each block of the host ring."""

    def __init__(
        self, values: SlotValues, view: torch.Tensor, arrays: Sequence[Array] = (), span: slice = slice(0, 0)
    ) -> None:
        self.values = values
        self.slot = values.slot
        self.path = values.slot.path
        self.view = view
        self.arrays = arrays
        self.span = span
        """Where the slot lies in the block, in bytes."""


class Fit:
    """A cell for one used size: what to write where, with every slice taken already."""

    def __init__(self, cell: Cell, used: Mapping[str, int]) -> None:
        self.cell = cell
        self.slot = cell.slot
        self.path = cell.path
        self.values = cell.values
        self.packed = bool(cell.arrays)
        self.name = cell.path[0] if len(cell.path) == 1 else None
        """The field, where its path has no dots."""
        self.kind = cell.values.kind if self.packed and not cell.values.has_bits else None
        """The numpy type that can be written as it is."""
        self.filler = cell.values.filler
        self.device = cell.view.device
        self.shape = cell.slot.sizes(used)
        region = tuple(slice(0, size) for size in self.shape)
        tails = _tails(self.shape, tuple(cell.view.shape))
        self.used = cell.view[region] if region else cell.view
        self.tails = [cell.view[tail] for tail in tails]
        self.arrays: list[Array] = [array[region] if region else array for array in cell.arrays]
        self.array_tails = [[array[tail] for tail in tails] for array in cell.arrays]
        self._rows: list[torch.Tensor] = []
        num_bytes = self.used.numel() * self.used.element_size()
        self.empty = num_bytes == 0
        # A grouped copy is one kernel only for contiguous tensors, and the slower way for large ones.
        self.grouped = self.slot.place == "device" and num_bytes <= _LARGE_BYTES and self.used.is_contiguous()

    def host_rows(self, index: int) -> torch.Tensor:
        """The used rows in one block of the host ring, as a tensor."""
        if not self._rows:
            with torch.inference_mode(False):
                self._rows = [self.values.over(array) for array in self.arrays]
        return self._rows[index]


def _tails(used: tuple[int, ...], padded: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Disjoint regions that, together with the used one, cover the padded shape."""
    regions = []
    for axis, (inner, outer) in enumerate(zip(used, padded, strict=True)):
        if inner < outer:
            before = tuple(slice(0, size) for size in used[:axis])
            after = tuple(slice(0, size) for size in padded[axis + 1 :])
            regions.append((*before, slice(inner, outer), *after))
    return regions


class Steps:
    """What a load does for one used size, without the slots that its path leaves out."""

    def __init__(self, layout: Layout, used: Mapping[str, int], without: frozenset[str]) -> None:
        cells = [cell for cell in layout.cells if cell.slot.name not in without]
        fits = [Fit(cell, used) for cell in cells]
        self.fits = fits
        self.left_out = frozenset(cell.path for cell in layout.cells if cell.slot.name in without)
        self.loaded = [fit for fit in fits if fit.slot.compute is None]
        self.computed = [(fit, Fit(fit.cell, layout.padded)) for fit in fits if fit.slot.compute is not None]
        """With the fit for a function that gives padded rows itself."""
        self.views: dict[Path, Any] = {cell.path: cell.view for cell in cells} | layout.sizes
        """The padded view of every field, and the padded sizes."""
        self.used: dict[Path, torch.Tensor] = {fit.path: fit.used for fit in fits}


class Layout:
    """All slots at one padded extent: tight, each view contiguous, packed slots in one block."""

    def __init__(
        self,
        values: Sequence[SlotValues],
        dims: Mapping[str, Dim],
        padded: Mapping[str, int],
        memory: Memory,
        adopted: Mapping[str, torch.Tensor],
        owner: str,
    ) -> None:
        self._owner = owner
        self.padded = {name: padded[name] for name in dims}
        self.sizes: dict[Path, int] = {path_of(dim.field): padded[name] for name, dim in dims.items() if dim.field}
        spans, num_bytes = packed_spans([v.slot for v in values if v.slot.name not in adopted], padded)
        self.block: PackedBlock | None = memory.block(num_bytes) if spans else None
        self._num_packed, self._num_bytes = len(spans), num_bytes
        self.cells = [self._cell(v, spans.get(v.slot.name), memory, adopted.get(v.slot.name)) for v in values]
        self._steps: dict[tuple[tuple[int, ...], frozenset[str]], Steps] = {}
        self._parts: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        written = [cell.view for cell in self.cells if not cell.arrays]
        if self.block is not None:
            written.append(self.block.tensor[:num_bytes])
        self._memory = _spans_of(written)

    def _cell(self, values: SlotValues, span: slice | None, memory: Memory, adopted: torch.Tensor | None) -> Cell:
        slot, shape = values.slot, values.slot.sizes(self.padded)
        if span is not None and self.block is not None:
            view = self.block.tensor[span].view(slot.dtype).view(shape)
            arrays = [host.array[span].view(values.kind).reshape(shape) for host in self.block.ring]
            return Cell(values, view, arrays, span)
        if adopted is not None:
            return Cell(values, adopted[tuple(slice(0, size) for size in shape)] if shape else adopted)
        return Cell(values, memory.flat(slot, num_elements(slot, self.padded)).view(shape))

    def steps(self, used: Mapping[str, int], key: tuple[int, ...], without: frozenset[str]) -> Steps:
        """What to do for these used sizes, of which `key` is the tuple; made once and kept."""
        steps = self._steps.get((key, without))
        if steps is None:
            self._check_used(used)
            if len(self._steps) >= _MAX_KEPT:
                self._steps.clear()
            steps = self._steps[key, without] = Steps(self, used, without)
        return steps

    def _check_used(self, used: Mapping[str, int]) -> None:
        for name, size in self.padded.items():
            if not 0 <= used[name] <= size:
                raise LoadError(
                    f"loading {self._owner}: the batch uses {used[name]} {name}, and is to be padded to {size}. "
                    "Choose an extent that holds it."
                )

    def part(self, written: Sequence[Fit], padded: Sequence[Fit]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The part of the block that reaches over these slots, and the same part of each host block."""
        if len(written) == self._num_packed:
            start, end = 0, self._num_bytes
        else:
            spans = [fit.cell.span for fit in (*written, *padded)]
            start, end = min(span.start for span in spans), max(span.stop for span in spans)
        part = self._parts.get((start, end))
        if part is None:
            assert self.block is not None
            with torch.inference_mode(False):
                host = [block.tensor[start:end] for block in self.block.ring]
                part = self._parts[start, end] = (self.block.tensor[start:end], host)
        return part

    def copied(self, cells: Sequence[Cell]) -> dict[Path, torch.Tensor]:
        """Copies of what these cells hold, in memory that no load writes: packed slots in one copy."""
        if torch.is_inference_mode_enabled():  # an inference tensor could not be written outside inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self.copied(cells)
        made: dict[Path, torch.Tensor] = {}
        typed: dict[torch.dtype, torch.Tensor] = {}
        block: torch.Tensor | None = None
        for cell in cells:
            view, kind = cell.view, cell.slot.dtype
            if not cell.arrays:
                made[cell.path] = view.clone()
                continue
            if block is None:
                assert self.block is not None
                block = self.block.tensor[: -(-self._num_bytes // _ALIGNMENT) * _ALIGNMENT].clone()
            if kind not in typed:
                whole = block.numel() // kind.itemsize * kind.itemsize  # a smaller item may come last
                typed[kind] = block[:whole].view(kind)
            made[cell.path] = typed[kind].as_strided(view.shape, view.stride(), cell.span.start // kind.itemsize)
        return made

    def passed(self, index: int) -> None:
        """Mark that a transfer from this host block is in flight."""
        assert self.block is not None
        self.block.ring[index].fence.record()

    def note_tails(self, index: int, steps: Steps) -> None:
        """Note that the last write of a host block was by these steps, pad values included."""
        assert self.block is not None
        self.block.ring[index].padded_for = steps

    def take(self) -> tuple[int, object]:
        """The number of the host block to write next, and the steps whose pad values still stand in it."""
        assert self.block is not None
        return self.block.take()

    def holds(self, address: int) -> bool:
        """Whether an address lies in the buffers of this layout."""
        starts, ends = self._memory
        position = bisect_right(starts, address) - 1
        return position >= 0 and address < ends[position]


def _spans_of(views: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Where each view starts and ends, in the order of addresses."""
    spans = sorted((view.data_ptr(), view.data_ptr() + reach(view)) for view in views if view.numel())
    return [start for start, _ in spans], [end for _, end in spans]


class Layouts:
    """The layouts made over one memory."""

    def __init__(
        self,
        values: Sequence[SlotValues],
        dims: Mapping[str, Dim],
        memory: Memory,
        adopted: Mapping[str, torch.Tensor],
        *,
        owner: str,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._owner = owner
        self.memory = memory
        self._values = values
        self._dims = dims
        self._adopted = adopted
        self._limits = limits
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def at(self, padded: Mapping[str, int], key: tuple[int, ...]) -> Layout:
        """The layout for these padded sizes, of which `key` is the tuple; made once and kept."""
        layout = self._layouts.get(key)
        if layout is None:
            self._check_limits(padded)
            generation = self.memory.generation
            # Whatever the ambient mode: an inference tensor could not be written outside inference mode.
            with torch.inference_mode(False), torch.no_grad():
                layout = Layout(self._values, self._dims, padded, self.memory, self._adopted, self._owner)
            # Layouts over replaced memory are dropped, and eager sizes are unbounded.
            if self.memory.generation != generation or (self._limits is None and len(self._layouts) >= _MAX_KEPT):
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the buffers of these layouts."""
        return any(layout.holds(tensor.data_ptr()) for layout in self._layouts.values())

    def _check_limits(self, padded: Mapping[str, int]) -> None:
        for name, limit in (self._limits or {}).items():
            if padded[name] > limit:
                raise LoadError(
                    f"loading {self._owner}: the batch is to be padded to {padded[name]} {name}, and the buffers "
                    f"hold {limit}. Declare them larger, or run it eagerly."
                )
