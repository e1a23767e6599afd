"""Registry: the only writer of a slot's buffer. A load leaves every element of the padded view defined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.devices import Device
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.inputs.extent import Dim, Extent, check_dims, padded_sizes
from phonograph.graphs.inputs.fields import Path, expose, fetch, path_of
from phonograph.graphs.inputs.layout import Layout, Layouts, Steps, num_elements, packed_spans
from phonograph.graphs.inputs.loading import Load, LoadCounts, LoadMode
from phonograph.graphs.inputs.memory import GrowingMemory, LeasedMemory, place_of
from phonograph.graphs.inputs.pool import BufferPool, Lease
from phonograph.graphs.inputs.slot import Slot, check_known, check_slots
from phonograph.graphs.inputs.values import SlotValues

__all__ = ["LoadCounts", "LoadMode", "Registry", "View"]

_NOTHING: Mapping[str, Any] = {}
Prepared = tuple[Layout, Steps]


@dataclass(frozen=True)
class View:
    """What a load returns: copies of the batch and of the keyword arguments, with buffer views in the slots' fields."""

    batch: Any
    kwargs: Mapping[str, Any]
    extent: Extent


@dataclass(frozen=True)
class _Carrier:
    """A field of the batch, and the axis of it that shows the size of a dim."""

    path: Path
    axis: int
    optional: bool
    neutral: bool
    """Whether it has a neutral value for when it is absent."""


def _carriers(slots: Sequence[Slot], dim: str) -> list[_Carrier]:
    return [
        _Carrier(slot.path, slot.shape.index(dim), slot.optional, slot.absent is not None)
        for slot in slots
        if dim in slot.dims and slot.compute is None
    ]


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
        self.device = device
        self.slots = tuple(slots)
        self.dims = dict(dims)
        self.owner = owner
        self.counts = LoadCounts()
        check_slots(self.slots)
        check_known(self.slots, self.dims)
        self._adopted = dict(adopt)
        self._check_adopted()
        self._names = frozenset(slot.name for slot in self.slots)
        self._values = [SlotValues(slot, owner) for slot in self.slots]
        self._carriers = {name: _carriers(self.slots, name) for name in dims}
        self._size_paths = {name: path_of(dim.field) for name, dim in dims.items() if dim.field is not None}
        self._ratios = [(name, dim.per, dim.times) for name, dim in dims.items() if dim.per is not None]
        self._growing = GrowingMemory(device)
        self._eager = Layouts(self._values, self.dims, self._growing, _NOTHING, owner=owner)
        self._graph: Layouts | None = None
        self._pool: BufferPool | None = None
        self._leases: tuple[Lease, ...] = ()
        self._not_live: frozenset[Path] = frozenset()
        """Fields that the last load for a graph did not put a value of the batch into."""

    # -- declare ------------------------------------------------------------------------------------------

    def declare(self, pool: BufferPool, bucketed: str, largest: int) -> None:
        """Ask the pool for the buffers that graphs will read, as large as the largest bucket needs."""
        if self._graph is not None:
            raise DeclarationError(
                f"the buffers of {self.owner} are declared already. Graphs may hold them: keep them."
            )
        self._pool = pool
        check_dims(self.dims, bucketed)
        sizes = padded_sizes(self.dims, bucketed, largest)
        self._check_adopted_shapes(sizes)
        own = [slot for slot in self.slots if slot.name not in self._adopted]
        packed, num_bytes = packed_spans(own, sizes)
        block = None
        if packed:
            # One transfer fills all of it, so one slot that is not to be shared keeps the others to itself.
            shared = all(slot.shared for slot in own if slot.name in packed)
            place = self.device.torch_device
            block = pool.request("packed inputs", num_bytes, torch.uint8, place, self.owner, shared=shared)
        flats = {
            slot.name: pool.request(
                slot.name,
                num_elements(slot, sizes),
                slot.dtype,
                place_of(slot, self.device),
                self.owner,
                shared=slot.shared,
            )
            for slot in own
            if slot.name not in packed
        }
        self._leases = (*([] if block is None else [block]), *flats.values())
        memory = LeasedMemory(pool, block, flats)
        self._graph = Layouts(self._values, self.dims, memory, self._adopted, owner=self.owner, limits=sizes)

    def _check_adopted(self) -> None:
        by_name = {slot.name: slot for slot in self.slots}
        for name, tensor in self._adopted.items():
            if name not in by_name:
                raise DeclarationError(
                    f"adopting a tensor for {name!r}, which is no slot. Name one of these: {', '.join(by_name)}."
                )
            slot, where = by_name[name], place_of(by_name[name], self.device)
            if tensor.dtype != slot.dtype or tensor.device != where:
                raise DeclarationError(
                    f"adopting a tensor for slot {name!r}: it is {tensor.dtype} on {tensor.device}, "
                    f"the slot is {slot.dtype} on {where}. Convert it, or change the slot."
                )
            if tensor.is_inference():
                raise DeclarationError(
                    f"adopting a tensor for slot {name!r}: made under inference mode, it can't be written outside it. "
                    "Make it under torch.inference_mode(False)."
                )

    def _check_adopted_shapes(self, sizes: Mapping[str, int]) -> None:
        for slot in self.slots:
            if slot.name not in self._adopted:
                continue
            have, want = tuple(self._adopted[slot.name].shape), slot.sizes(sizes)
            holds = len(have) == len(want) and all(
                found >= wanted if isinstance(size, str) else found == wanted
                for found, wanted, size in zip(have, want, slot.shape, strict=True)
            )
            if not holds:
                raise DeclarationError(
                    f"adopting a tensor for slot {slot.name!r}: its shape {have} does not hold {want}. "
                    "Make it as large as the largest bucket."
                )

    # -- measure ------------------------------------------------------------------------------------------

    def size_of(self, dim: str, batch: Any, kwargs: Mapping[str, Any] = _NOTHING) -> int:
        """How much of a dim the batch uses."""
        if dim in self._size_paths:
            named = fetch(batch, kwargs, self._size_paths[dim])
            if named is not None:
                return int(named)
        for carrier in self._carriers[dim]:
            size = _size_along(fetch(batch, kwargs, carrier.path), carrier.axis)
            if size is not None:
                return size
        return self._size_without_carrier(dim, batch, kwargs)

    def _size_without_carrier(self, dim: str, batch: Any, kwargs: Mapping[str, Any]) -> int:
        """The size of a dim that no value of the batch shows.

        All of it where its values are computed, or where a neutral value stands for them: that is what a graph
        reads. Nothing where they are empty, or where nothing stands for them.
        """
        declared, carriers = self.dims[dim], self._carriers[dim]
        empty = [_is_empty(fetch(batch, kwargs, one.path)) for one in carriers]
        if all(one.optional for one in carriers) and not any(empty):
            if declared.per is not None:
                return self.size_of(declared.per, batch, kwargs) * declared.times
            if declared.limit is not None and (not carriers or any(one.neutral for one in carriers)):
                return declared.limit
        if carriers and all(one.optional or none for one, none in zip(carriers, empty, strict=True)):
            return 0
        sources = [*([declared.field] if declared.field else []), *(".".join(one.path) for one in carriers)]
        where = " or ".join(map(repr, sources)) or "no field"
        raise LoadError(
            f"loading {self.owner}: the batch gives no size for dim {dim!r}; expected one in {where}. "
            f"Give that a value, or name a field: Dim({dim!r}, field=…)."
        )

    def measure(self, batch: Any, kwargs: Mapping[str, Any] = _NOTHING) -> dict[str, int]:
        """How much of every dim the batch uses."""
        used = {dim: self.size_of(dim, batch, kwargs) for dim in self.dims}
        for name, base, times in self._ratios:
            if used[name] != used[base] * times:
                raise LoadError(
                    f"loading {self.owner}: the batch uses {used[name]} {name} and {used[base]} {base}; "
                    f"{name} is declared as {times} per {base}. Give as many, or declare it with a limit."
                )
        return used

    # -- load ---------------------------------------------------------------------------------------------

    def load(
        self,
        batch: Any,
        extent: Extent,
        *,
        mode: LoadMode = LoadMode.GRAPH,
        kwargs: Mapping[str, Any] = _NOTHING,
        without: frozenset[str] = frozenset(),
        anew: bool = False,
    ) -> View:
        """Fill the buffers and return the view; slots named in `without` carry the batch's own value.

        With `anew` the view's tensors are new objects over the buffers, as a caller's are new in every call: what a
        body remembers by `is`, `id()` or a hash must not be found again.
        """
        prepared = self._steps(extent, mode, without)
        exposed = self._fill(batch, extent, mode, kwargs, prepared)
        values = prepared[1].views | exposed
        if anew:
            values = {path: one.detach() if isinstance(one, torch.Tensor) else one for path, one in values.items()}
        return _view(batch, kwargs, values, extent)

    def live(
        self,
        batch: Any,
        extent: Extent,
        *,
        kwargs: Mapping[str, Any] = _NOTHING,
        without: frozenset[str] = frozenset(),
    ) -> View:
        """What was just loaded for a graph, without its padding: used rows of the buffers.

        Where the load had nothing to put (an absent keyed input, a slot left out) the batch's own value stands.
        """
        _, steps = self._steps(extent, LoadMode.GRAPH, without)
        values = {path: rows for path, rows in steps.used.items() if path not in self._not_live}
        return _view(batch, kwargs, values, extent)

    def prepare(self, extent: Extent, *, without: frozenset[str] = frozenset()) -> Prepared:
        """What all loads of this extent for a graph share; always valid, since graphs' buffers are fixed."""
        return self._steps(extent, LoadMode.GRAPH, without)

    def fill_prepared(self, batch: Any, extent: Extent, kwargs: Mapping[str, Any], prepared: Prepared) -> None:
        """Write the buffers for a graph, with the extent's preparation already at hand."""
        self._fill(batch, extent, LoadMode.GRAPH, kwargs, prepared)

    def _fill(
        self, batch: Any, extent: Extent, mode: LoadMode, kwargs: Mapping[str, Any], prepared: Prepared
    ) -> dict[Path, Any]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._fill(batch, extent, mode, kwargs, prepared)
        layout, steps = prepared
        load = Load(layout, mode, self.counts)
        load.take_all(steps, batch, kwargs)
        if steps.computed:
            self._compute(batch, extent, mode, kwargs, steps, load)
        load.issue()
        if mode is LoadMode.NO_COPY:
            return load.exposed | layout.copied([fit.cell for fit in steps.fits if fit.path not in load.exposed])
        if mode is LoadMode.GRAPH:
            self._count_load()
            self._not_live = steps.left_out.union(load.absent) if load.absent else steps.left_out
        return load.exposed

    @property
    def num_loads(self) -> int:
        """Counts all loads, by any runner, that may write a buffer which graphs of this registry read."""
        if self._pool is None or self._adopted:
            return 0 if self._pool is None else self._pool.num_loads
        return sum([lease.loads.count for lease in self._leases], self._pool.num_adopted_loads)

    def _count_load(self) -> None:
        if self._pool is not None:
            self._pool.num_loads += 1
            self._pool.num_adopted_loads += bool(self._adopted)
        for lease in self._leases:
            lease.loads.count += 1

    def _compute(
        self, batch: Any, extent: Extent, mode: LoadMode, kwargs: Mapping[str, Any], steps: Steps, load: Load
    ) -> None:
        """Computed slots run after the others and see their loaded values; host values as tensors on the host.

        What they give is packed like any other host value, so that all go in one transfer. Where a function declines,
        the batch's own value is loaded in its place, on either path; a keyed slot for which the batch has None is
        absent, whatever its function would say, since that None chose the recording.
        """
        loaded = load.seen()
        seen = _view(batch, kwargs, loaded, extent).batch if loaded else batch
        asked = extent if mode is LoadMode.GRAPH else replace(extent, for_graph=False)
        for fit, full in steps.computed:
            assert fit.slot.compute is not None
            own = fetch(batch, kwargs, fit.path)
            absent = fit.slot.keyed and own is None
            value = None if absent else fit.slot.compute(seen, asked)
            if value is None:
                load.take(fit, own)
            else:
                load.take_computed(fit, full, value)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Loads inside are undone: graphs' buffers get their content back, and no load is counted."""
        memory = [*(lease.allocation for lease in self._leases), *self._adopted.values()]
        held, counts = [tensor.clone() for tensor in memory], [lease.loads.count for lease in self._leases]
        pool, not_live, issued = self._pool, self._not_live, replace(self.counts)
        totals = (pool.num_loads, pool.num_adopted_loads) if pool is not None else (0, 0)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(memory, held, strict=True):
                    tensor.copy_(before)
            for lease, count in zip(self._leases, counts, strict=True):
                lease.loads.count = count
            if pool is not None:
                pool.num_loads, pool.num_adopted_loads = totals
            self._not_live = not_live
            for name, value in vars(issued).items():
                setattr(self.counts, name, value)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a buffer, of graphs or of the eager path, that the next load overwrites."""
        return self._growing.holds(tensor) or (self._graph is not None and self._graph.holds(tensor))

    def poison_unread(self, extent: Extent, pattern: int) -> None:
        """Write poison, within the legal range, into the tails that slots declare as unread."""
        self._count_load()
        _, steps = self._steps(extent, LoadMode.GRAPH, frozenset())
        for fit in steps.fits:
            if fit.slot.is_unread:
                for tail in fit.tails:
                    tail.fill_(fit.slot.poison(pattern))

    def _steps(self, extent: Extent, mode: LoadMode, without: frozenset[str]) -> Prepared:
        layouts = self._graph if mode is LoadMode.GRAPH else self._eager
        if layouts is None:
            raise DeclarationError(
                f"loading {self.owner} for a graph before its buffers are declared. Call declare(pool, …)."
            )
        layout = layouts.at(extent.padded, self._key(extent.padded))
        if without and not without <= self._names:
            unknown = ", ".join(sorted(without - self._names))
            raise DeclarationError(f"loading {self.owner} without {unknown}, which is no slot. Correct the name.")
        return layout, layout.steps(extent.used, self._key(extent.used), without)

    def _key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        try:
            return tuple([sizes[name] for name in self.dims])
        except KeyError as error:
            raise LoadError(
                f"loading {self.owner}: the extent says nothing of dim {error} (it has {', '.join(sizes)}). Add it."
            ) from None


def _view(batch: Any, kwargs: Mapping[str, Any], values: Mapping[Path, Any], extent: Extent) -> View:
    if not kwargs:
        return View(expose(batch, values), kwargs, extent)
    aside = {path: value for path, value in values.items() if path[0] in kwargs}
    in_batch = {path: value for path, value in values.items() if path[0] not in kwargs}
    return View(expose(batch, in_batch), expose(dict(kwargs), aside), extent)


def _size_along(value: Any, axis: int) -> int | None:
    """The size of an axis of a tensor, array or nested list, or None where the value doesn't show it."""
    if hasattr(value, "shape"):
        return int(value.shape[axis]) if axis < len(value.shape) else None
    for _ in range(axis):
        value = value[0] if isinstance(value, list | tuple) and value else None
    return len(value) if isinstance(value, list | tuple) else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value
