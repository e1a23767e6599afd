"""The registry: the only writer of a slot's buffer. A load leaves every element of the padded view defined."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from phonograph.devices import Device, Fence
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.extent import Dim, Extent, padded_sizes
from phonograph.graphs.fields import Path, expose, fetch
from phonograph.graphs.layout import (
    Array,
    Fit,
    GrowingMemory,
    HostRing,
    Layout,
    LeasedMemory,
    Memory,
    numpy_dtype,
    packed_offsets,
)
from phonograph.graphs.pool import BufferPool
from phonograph.graphs.slots import Slot, check_slots

_LARGE_BYTES = 1 << 20
_NOTHING: Mapping[str, Any] = {}


class LoadMode(Enum):
    """How a path takes its inputs."""

    GRAPH = "graph"
    """Into the buffers that graphs read; a neutral value stands for an absent input."""
    EAGER = "eager"
    """Into buffers that grow; an absent input stays None."""
    NO_COPY = "no_copy"
    """As EAGER, but device values are carried, not copied."""


@dataclass
class LoadCounts:
    """Copies that loads have issued."""

    transfers: int = 0
    """From host to device."""
    grouped: int = 0
    """Device to device, all small values of a load in one call."""
    plain: int = 0
    """Device to device, one large value each."""


@dataclass(frozen=True)
class View:
    """What a load returns: copies of the batch and of what is beside it, with buffer views in the slots' fields."""

    batch: Any
    beside: Mapping[str, Any]
    extent: Extent


@dataclass
class _Pending:
    """The copies of one load."""

    ring_index: int
    fence: Fence | None
    packed: bool = False
    loaded: dict[Path, Array] = field(default_factory=dict)
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    large: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    exposed: dict[Path, Any] = field(default_factory=dict)
    """Fields whose view is not the cell's: None, or a carried value."""


class _Buffers:
    """The memory of one path and the layouts made over it."""

    def __init__(self, device: Device, memory: Memory, growing: bool) -> None:
        self.memory = memory
        self.ring = HostRing(device)
        self.growing = growing
        self.num_bytes = 0
        self.layouts: dict[tuple[int, ...], Layout] = {}


class Registry:
    """Loads batches into the buffers of a phase's slots."""

    def __init__(
        self,
        device: Device,
        slots: Sequence[Slot],
        dims: Mapping[str, Dim],
        *,
        owner: str = "registry",
        adopt: Mapping[str, torch.Tensor] = _NOTHING,
    ) -> None:
        check_slots(slots)
        self.device = device
        self.slots = tuple(slots)
        self.dims = dict(dims)
        self.owner = owner
        self.counts = LoadCounts()
        self._adopted = dict(adopt)
        self._computed = any(slot.compute is not None for slot in slots)
        self._carriers = {name: self._carriers_of(name) for name in dims}
        self._growing = GrowingMemory(device)
        self._eager = _Buffers(device, self._growing, growing=True)
        self._graph: _Buffers | None = None
        for slot in slots:
            unknown = [name for name in slot.dims if name not in dims]
            if unknown:
                raise DeclarationError(
                    f"slot {slot.name!r} has the unknown dim {unknown[0]!r} (known: {', '.join(dims)})."
                )

    def _carriers_of(self, dim: str) -> list[tuple[Path, int]]:
        return [
            (tuple(slot.field.split(".")), slot.shape.index(dim))
            for slot in self.slots
            if dim in slot.dims and slot.compute is None
        ]

    def declare(self, pool: BufferPool, bucketed: str, largest: int) -> None:
        """Ask the pool for the buffers that graphs will read, as large as the largest bucket needs."""
        sizes = padded_sizes(self.dims, bucketed, largest)
        self._check_adopted(sizes)
        _, num_bytes = packed_offsets(self.slots, sizes, self._adopted)
        device = self.device.torch_device
        block = pool.request("packed inputs", num_bytes, torch.uint8, device, self.owner)
        flats = {}
        packed, _ = packed_offsets(self.slots, sizes, self._adopted)
        for slot in self.slots:
            if slot.name not in packed and slot.name not in self._adopted:
                place = torch.device("cpu") if slot.place == "host" else device
                count = int(np.prod(slot.sizes(sizes), dtype=np.int64))
                flats[slot.name] = pool.request(slot.name, count, slot.dtype, place, self.owner)
        self._graph = _Buffers(self.device, LeasedMemory(block, flats), growing=False)
        self._graph.num_bytes = num_bytes

    def _check_adopted(self, sizes: Mapping[str, int]) -> None:
        by_name = {slot.name: slot for slot in self.slots}
        for name, tensor in self._adopted.items():
            if name not in by_name:
                raise DeclarationError(
                    f"adopting a tensor for {name!r}, which is no slot (slots: {', '.join(by_name)})."
                )
            slot = by_name[name]
            want = slot.sizes(sizes)
            where = torch.device("cpu") if slot.place == "host" else self.device.torch_device
            if tensor.dtype != slot.dtype or tensor.device.type != where.type:
                raise DeclarationError(
                    f"adopting a tensor for slot {name!r}: it is {tensor.dtype} on {tensor.device}, "
                    f"the slot is {slot.dtype} on {where}."
                )
            fits = tensor.dim() == len(want) and all(
                have >= need if isinstance(size, str) else have == need
                for have, need, size in zip(tensor.shape, want, slot.shape, strict=True)
            )
            if not fits:
                raise DeclarationError(
                    f"adopting a tensor for slot {name!r}: its shape {tuple(tensor.shape)} does not hold {want}."
                )
            if tensor.is_inference():
                raise DeclarationError(
                    f"adopting a tensor for slot {name!r}: made under inference mode, it can't be written outside it. "
                    "Make it under torch.inference_mode(False)."
                )

    def size_of(self, dim: str, batch: Any, beside: Mapping[str, Any] = _NOTHING) -> int:
        """How much of a dim the batch uses."""
        named = self.dims[dim].field
        if named is not None:
            size = fetch(batch, beside, (named,))
            if size is not None:
                return int(size)
        for path, axis in self._carriers[dim]:
            value = fetch(batch, beside, path)
            if value is not None:
                shape = value.shape if hasattr(value, "shape") else np.shape(value)
                if len(shape) > axis:
                    return int(shape[axis])
        names = ", ".join(".".join(path) for path, _ in self._carriers[dim]) or "no slot"
        raise LoadError(f"loading {self.owner}: the batch gives no size for dim {dim!r} (it is read from {names}).")

    def measure(self, batch: Any, beside: Mapping[str, Any] = _NOTHING) -> dict[str, int]:
        """How much of every dim the batch uses."""
        return {dim: self.size_of(dim, batch, beside) for dim in self.dims}

    def load(
        self,
        batch: Any,
        extent: Extent,
        *,
        mode: LoadMode = LoadMode.GRAPH,
        beside: Mapping[str, Any] = _NOTHING,
        without: frozenset[str] = frozenset(),
    ) -> View:
        """Fill the buffers and return the view; slots named in `without` carry the batch's own value."""
        exposed = self.fill(batch, extent, mode=mode, beside=beside, without=without)
        layout = self._layout(extent.padded, mode)
        values: dict[Path, Any] = {cell.path: cell.view for cell in layout.cells if cell.slot.name not in without}
        return self._exposing(batch, beside, values | exposed | layout.sizes, extent)

    def live(
        self,
        batch: Any,
        extent: Extent,
        *,
        beside: Mapping[str, Any] = _NOTHING,
        without: frozenset[str] = frozenset(),
    ) -> View:
        """The loaded batch without its padding: used rows of the graph's buffers, None where the batch has None."""
        values: dict[Path, Any] = {}
        for fit in self._layout(extent.padded, LoadMode.GRAPH).fits(extent.used):
            absent = fit.slot.optional and fetch(batch, beside, fit.path) is None
            if fit.slot.name not in without and not absent:
                values[fit.path] = fit.used
        return self._exposing(batch, beside, values, extent)

    def fill(
        self,
        batch: Any,
        extent: Extent,
        *,
        mode: LoadMode = LoadMode.GRAPH,
        beside: Mapping[str, Any] = _NOTHING,
        without: frozenset[str] = frozenset(),
    ) -> dict[Path, Any]:
        """Write the buffers; returns the fields whose view is not the buffer's."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.fill(batch, extent, mode=mode, beside=beside, without=without)
        layout = self._layout(extent.padded, mode)
        index, fence = self._buffers(mode).ring.take() if layout.num_bytes else (0, None)
        pending = _Pending(index, fence)
        for fit in layout.fits(extent.used):
            if fit.slot.compute is None and fit.slot.name not in without:
                self._take(fit, fetch(batch, beside, fit.path), mode, pending)
        if self._computed:
            self._compute(batch, extent, layout, mode, beside, without, pending)
        self._issue(layout, pending)
        return pending.exposed

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a buffer of the eager path."""
        return self._growing.holds(tensor)

    def poison_unread(self, extent: Extent, pattern: int) -> None:
        """Write legal nonsense into the tails that slots claim nobody reads."""
        for fit in self._layout(extent.padded, LoadMode.GRAPH).fits(extent.used):
            if fit.fill is None:
                for tail in fit.tails:
                    tail.fill_(poison_value(fit.slot, pattern))

    def _exposing(self, batch: Any, beside: Mapping[str, Any], values: dict[Path, Any], extent: Extent) -> View:
        if not beside:
            return View(expose(batch, values), beside, extent)
        aside = {path: value for path, value in values.items() if path[0] in beside}
        in_batch = {path: value for path, value in values.items() if path[0] not in beside}
        return View(expose(batch, in_batch), expose(dict(beside), aside), extent)

    def _buffers(self, mode: LoadMode) -> _Buffers:
        if mode is not LoadMode.GRAPH:
            return self._eager
        if self._graph is None:
            raise DeclarationError(
                f"loading {self.owner} for a graph before its buffers are declared. Call declare(pool, …)."
            )
        return self._graph

    def _layout(self, padded: Mapping[str, int], mode: LoadMode) -> Layout:
        buffers = self._buffers(mode)
        key = tuple(padded.values())
        layout = buffers.layouts.get(key)
        if layout is None:
            adopted = self._adopted if mode is LoadMode.GRAPH else _NOTHING
            if buffers.growing:
                # A layout points into the memory and the ring as they were: growth starts anew.
                _, num_bytes = packed_offsets(self.slots, padded, adopted)
                if num_bytes > buffers.num_bytes:
                    buffers.num_bytes = num_bytes
                    buffers.layouts.clear()
            buffers.ring.at_least(buffers.num_bytes)
            layout = Layout(self.slots, self.dims, padded, buffers.memory, buffers.ring, adopted)
            buffers.layouts[key] = layout
        return layout

    def _take(self, fit: Fit, value: Any, mode: LoadMode, pending: _Pending) -> None:
        """Put one value on its way into its buffer, and its pad value into the tail."""
        slot = fit.slot
        if value is None:
            self._take_absent(fit, mode, pending)
        elif isinstance(value, torch.Tensor) and value.device.type == fit.view.device.type:
            self._take_tensor(fit, value, mode, pending)
        elif fit.packed:
            array = self._as_array(slot, value)
            if array.shape != fit.shape:
                raise self._wrong_shape(slot, array.shape, fit.shape)
            target = fit.arrays[pending.ring_index]
            target[...] = array
            pending.loaded[fit.path] = target
            self._fill_tails(fit, pending)
            pending.packed = True
        else:
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(self._as_array(slot, value))
            self.counts.transfers += fit.view.device.type != "cpu"
            self._take_tensor(fit, tensor, LoadMode.EAGER, pending)

    def _take_tensor(self, fit: Fit, value: torch.Tensor, mode: LoadMode, pending: _Pending) -> None:
        slot = fit.slot
        if value.shape != fit.shape:
            raise self._wrong_shape(slot, tuple(value.shape), fit.shape)
        if value.dtype != slot.dtype and not torch.can_cast(value.dtype, slot.dtype):
            raise LoadError(
                f"loading {self.owner}: slot {slot.name!r} is {slot.dtype}, the batch has {value.dtype}. Convert it."
            )
        if mode is LoadMode.NO_COPY and value.dtype == slot.dtype:
            pending.exposed[fit.path] = value
            return
        if fit.num_bytes > _LARGE_BYTES:
            pending.large.append((fit.used, value))
        elif fit.num_bytes:
            pending.targets.append(fit.used)
            pending.sources.append(value)
        self._fill_tails(fit, pending)

    def _fill_tails(self, fit: Fit, pending: _Pending) -> None:
        if fit.fill is None or not fit.tails:
            return
        if fit.packed:
            for tail in fit.array_tails[pending.ring_index]:
                tail[...] = fit.fill
            pending.packed = True
        else:
            for view in fit.tails:
                view.fill_(fit.fill)

    def _take_absent(self, fit: Fit, mode: LoadMode, pending: _Pending) -> None:
        slot = fit.slot
        if not slot.optional:
            raise LoadError(
                f"loading {self.owner}: the batch has no {slot.field!r} for slot {slot.name!r}. "
                "Give it a value, or declare the slot with absent=… or keyed=True."
            )
        if slot.keyed or mode is not LoadMode.GRAPH:
            pending.exposed[fit.path] = None
        elif fit.packed:
            fit.cell.arrays[pending.ring_index][...] = slot.absent
            pending.packed = True
        else:
            fit.view.fill_(slot.absent)  # type: ignore[arg-type]

    def _compute(
        self,
        batch: Any,
        extent: Extent,
        layout: Layout,
        mode: LoadMode,
        beside: Mapping[str, Any],
        without: frozenset[str],
        pending: _Pending,
    ) -> None:
        """Computed slots run after the others and see their loaded values, used rows on the host, as tensors.

        What they give is packed like any other host value, so that all go in one transfer.
        """
        loaded: dict[Path, Any] = {path: torch.from_numpy(array) for path, array in pending.loaded.items()}
        seen = self._exposing(batch, beside, loaded, extent).batch if loaded else batch
        for fit in layout.fits(extent.used):
            slot = fit.slot
            if slot.compute is None or slot.name in without:
                continue
            value = slot.compute(seen, extent)
            if value is None:
                value = fetch(batch, beside, fit.path)
                if value is None or mode is not LoadMode.GRAPH:
                    pending.exposed[fit.path] = value
                    if mode is not LoadMode.GRAPH or slot.keyed:
                        continue
            self._take(fit, self._trimmed(fit, value), mode, pending)

    def _trimmed(self, fit: Fit, value: Any) -> Any:
        """A computed value may have the padded size; then its own tail stands."""
        shape = tuple(value.shape) if hasattr(value, "shape") else np.shape(value) if value is not None else ()
        if shape != fit.shape and shape == tuple(fit.view.shape):
            return value[tuple(slice(0, size) for size in fit.shape)]
        return value

    def _issue(self, layout: Layout, pending: _Pending) -> None:
        """One transfer for all host values; after it, since it overwrites the block, the device values."""
        if pending.packed and layout.block is not None:
            layout.block.copy_(layout.host[pending.ring_index], non_blocking=True)
            if pending.fence is not None:
                pending.fence.record()
            self.counts.transfers += 1
        if pending.targets:
            torch._foreach_copy_(pending.targets, pending.sources, non_blocking=True)
            self.counts.grouped += 1
        for target, source in pending.large:
            target.copy_(source, non_blocking=True)
            self.counts.plain += 1

    def _as_array(self, slot: Slot, value: Any) -> Array:
        """The value as numpy data that fits the slot's dtype without loss."""
        kind = numpy_dtype(slot.dtype)
        if isinstance(value, torch.Tensor):
            value = value.detach().numpy() if value.requires_grad else value.numpy()
        if not isinstance(value, np.ndarray):
            if not isinstance(value, list | tuple | numbers.Number | np.generic):
                raise LoadError(
                    f"loading {self.owner}: slot {slot.name!r} got a {type(value).__name__}; "
                    "expected a tensor, an array, a list or a number."
                )
            value = np.asarray(value)
            if value.size == 0:
                value = value.astype(kind)
        if value.dtype != kind:
            self._check_cast(slot, value, kind)
        return value  # type: ignore[no-any-return]

    def _check_cast(self, slot: Slot, value: Array, kind: np.dtype[Any] | None) -> None:
        if kind is None or np.can_cast(value.dtype, kind, "safe"):
            return
        if not np.can_cast(value.dtype, kind, "same_kind"):
            integers_to_float = value.dtype.kind in "iu" and kind.kind == "f"
            if not integers_to_float:
                raise LoadError(
                    f"loading {self.owner}: slot {slot.name!r} is {slot.dtype}, the batch has {value.dtype}. Convert it."
                )
        elif kind.kind in "iu" and value.size:
            limits = np.iinfo(kind)
            if value.min() < limits.min or value.max() > limits.max:
                raise LoadError(
                    f"loading {self.owner}: slot {slot.name!r} is {slot.dtype}, and a value of the batch "
                    f"({value.min()} … {value.max()}) does not fit. Declare a wider dtype."
                )

    def _wrong_shape(self, slot: Slot, found: tuple[int, ...], expected: tuple[int, ...]) -> LoadError:
        return LoadError(
            f"loading {self.owner}: slot {slot.name!r} has shape {slot.shape}, here {expected}, "
            f"but the batch has {tuple(found)}."
        )


def poison_value(slot: Slot, pattern: int) -> bool | int | float:
    """A finite value inside the slot's legal range; the two patterns differ wherever the range allows."""
    if slot.valid is not None:
        return slot.valid[pattern]
    return (-173.0, 211.0)[pattern] if slot.dtype.is_floating_point else 0
