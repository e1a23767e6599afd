"""RequestTables: request state on the device, a row per sequence, in tensors made from columns. Row 0 is null."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from phonograph.devices import Device
from phonograph.engine.state.column import Access, Array, Column, Group, TableSizes, TrialRows
from phonograph.engine.state.updates import ALIGNMENT, Block, TableUpdates, Write, lying_together
from phonograph.errors import DeclarationError, allocating
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.registry import LoadCounts, LoadMode, Registry
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.sizes import round_up

_WIDE = 4096
_MAX_KEPT = 512
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Copy = Callable[[], object]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Dataclass)


class RequestTables:
    """Owned by the engine, never pooled: a row means something from the entry of its sequence to its retirement.

    A column's tensor never moves. Those of a group that only some sequences ask for are made when they are first
    wanted, so whoever records a forward pass that reads them makes them before.
    """

    def __init__(self, device: Device, columns: Many[Column], sizes: TableSizes) -> None:
        self.columns = tuple(columns)
        self.sizes = sizes
        self._device = device
        self._by_name = {column.name: column for column in self.columns}
        self._by_group: dict[str, list[Column]] = {}
        for column in self.columns:
            self._by_group.setdefault(column.group.name, []).append(column)
        self._check_names()
        self._tensors: dict[str, torch.Tensor] = {}
        self._made: set[str] = set()
        self._stacks: dict[tuple[str, ...], torch.Tensor] = {}
        """Columns that lie together → all of them, as whole numbers."""
        self._kept_copies: dict[tuple[Write, ...], tuple[torch.Tensor, list[_Copy]]] = {}
        self._in_force: dict[str, set[int]] = {column.group.name: set() for column in columns if column.group.asked}
        """Group → rows that hold more than defaults, where only some sequences ask for it."""
        self._registry = Registry(
            device,
            [Slot("block", ("bytes",), torch.uint8, pad=Pad.fill(0))],
            {"bytes": Dim("bytes")},
            owner="request tables",
        )
        for name, group_columns in self._by_group.items():
            if group_columns[0].group.asked is None:
                self.make(name)

    def _check_names(self) -> None:
        if len(self._by_name) < len(self.columns):
            names = [column.name for column in self.columns]
            raise DeclarationError(f"two columns have the name {_repeated(names)!r}. Rename one.")
        for name, columns in self._by_group.items():
            if any(column.group != columns[0].group for column in columns):
                raise DeclarationError(f"two groups of columns have the name {name!r}. Rename one.")

    # -- tensors ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of a column: [rows], or [rows, width]."""
        tensor = self._tensors.get(name)
        if tensor is None:
            self.make(self._by_name[name].group.name)
            tensor = self._tensors[name]
        return tensor

    @property
    def last_token(self) -> torch.Tensor:
        return self._tensors["last_token"]

    @property
    def length(self) -> torch.Tensor:
        return self._tensors["length"]

    @property
    def pages(self) -> torch.Tensor:
        return self._tensors["pages"]

    @property
    def counts(self) -> LoadCounts:
        """Transfers so far."""
        return self._registry.counts

    def is_made(self, group: Group) -> bool:
        """Whether the columns of a group exist."""
        return group.name in self._made

    def make_all(self) -> None:
        """Make every group, for recordings that read them."""
        for name in self._by_group:
            self.make(name)

    def make(self, group: str) -> None:
        """Make the tensors of a group, if they are not there."""
        if group in self._made:
            return
        columns, on, size = self._by_group[group], self._device.torch_device, self.sizes.max_seqs + 1
        with (
            allocating(f"{group} for {self.sizes.max_seqs:,} sequences", "Lower max_seqs."),
            torch.inference_mode(False),
        ):
            made, stacks = dict[str, torch.Tensor](), dict[tuple[str, ...], torch.Tensor]()
            for together in lying_together(columns):
                names = tuple(column.name for column in together)
                stacks[names], tensors = _stacked(together, size, on)
                made |= zip(names, tensors, strict=True)
            for column in columns:
                shape = (size,) if column.width == 1 else (size, self.sizes.width(column.width))
                if column.name not in made:
                    made[column.name] = torch.full(shape, column.default, dtype=column.dtype, device=on)
        self._tensors |= made
        self._stacks |= stacks
        self._made.add(group)

    def gather(self, kind: type[T], rows: torch.Tensor, **others: Any) -> T:
        """A dataclass whose fields are columns, as these rows have them; `others` are the fields that are none."""
        columns = {name: self._gathered(name)[rows] for name in kind.__dataclass_fields__ if name not in others}
        return kind(**columns, **others)

    def _gathered(self, name: str) -> torch.Tensor:
        if name not in self._by_name or self._by_name[name].access is not Access.GATHERED:
            raise DeclarationError(f"{name!r} is no column that is gathered. Declare it, or take its tensor as it is.")
        return self[name]

    # -- the host's updates -------------------------------------------------------------------------------

    def apply(self, updates: TableUpdates) -> None:
        """Write the host's changes, after all steps launched so far: one transfer, then copies on the device."""
        for write in updates.writes:
            self.make(write.group)  # before anything is written: there may be no room
        left = self._left(updates)
        writes, block = self._with_resets(updates, left) if left else (updates.writes, updates.block)
        if not writes:
            return
        sizes = {"bytes": block.size}
        loaded = self._registry.load({"block": block}, Extent(sizes, sizes), mode=LoadMode.EAGER).batch["block"]
        for name, asking in updates.asking.items():
            self._in_force[name].update(asking)  # before they are: what raises half-way leaves something there
        for copy in self._copies(writes, loaded):
            copy()
        for name, rows in left.items():
            self._in_force[name].difference_update(rows)

    def _left(self, updates: TableUpdates) -> dict[str, list[int]]:
        """By group, the rows whose new owner does not ask for what the last one left there."""
        found = {}
        for name, in_force in self._in_force.items():
            if in_force and updates.entered:
                left = in_force.intersection(updates.entered).difference(updates.asking.get(name, ()))
                if left:
                    found[name] = sorted(left)
        return found

    def _with_resets(self, updates: TableUpdates, left: Mapping[str, list[int]]) -> tuple[tuple[Write, ...], Array]:
        """The writes and their block, after resets of these rows."""
        block, resets = Block(updates.block.tobytes()), list[Write]()
        for name, rows in left.items():
            names = tuple(column.name for column in self._by_group[name])
            resets.append(Write(name, names, "reset", len(rows), block.add_rows(rows)))
        return (*resets, *updates.writes), block.packed()

    def _copies(self, writes: tuple[Write, ...], loaded: torch.Tensor) -> list[_Copy]:
        """What performs these writes; kept, since most steps differ in nothing but the bytes of their block."""
        kept = self._kept_copies.get(writes)
        if kept is not None and kept[0] is loaded:
            return kept[1]
        if len(self._kept_copies) >= _MAX_KEPT:
            self._kept_copies.clear()
        # Whatever the ambient mode: a view made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            copies = [copy for write in writes for copy in self._copy(write, loaded)]
        self._kept_copies[writes] = loaded, copies
        return copies

    def _copy(self, write: Write, loaded: torch.Tensor) -> Iterator[_Copy]:
        indices = _part(loaded, write.indices, torch.int64, write.num)
        name = write.columns[0]
        if write.form == "reset":
            for name in write.columns:
                yield _filling(self[name], indices, self._by_name[name].default)
        elif write.form == "pairs":
            values = _part(loaded, write.values, self[name].dtype, write.num)
            yield partial(self[name].view(-1).index_copy_, 0, indices, values)
        elif write.columns in self._stacks:
            stack = self._stacks[write.columns]
            values = _part(loaded, write.values, stack.dtype, len(write.columns), write.num)
            yield partial(stack.index_copy_, 1, indices, values)
        else:
            values = _part(loaded, write.values, self[name].dtype, write.num, *self[name].shape[1:])
            yield partial(self[name].index_copy_, 0, indices, values)

    # -- trial runs ---------------------------------------------------------------------------------------

    @contextmanager
    def kept(self, count: int) -> Iterator[None]:
        """The null row and the first `count` rows hold afterwards what they held."""
        rows = [tensor[: count + 1] for tensor in self._tensors.values()]
        held = [tensor.clone() for tensor in rows]
        try:
            yield
        finally:
            for tensor, before in zip(rows, held, strict=True):
                tensor.copy_(before)

    def trial_values(self, trial: TrialRows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of the tensors that there are, and values on the device to copy there for trial runs."""
        found = []
        for name, tensor in self._tensors.items():
            column = self._by_name[name]
            if column.trial is not None:
                value = column.trial(trial).to(tensor.device, tensor.dtype)
                part = tensor[1 : trial.count + 1]
                whole = torch.full_like(part, column.default)
                (whole if value.dim() == 1 else whole[:, : value.shape[1]]).copy_(value)
                found.append((part, whole))
        return found


def _stacked(columns: Many[Column], num_rows: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Columns with items of one size in one tensor, so that one copy on the device writes them all: the tensor as whole
    numbers [num_columns, num_rows], rounded up so that each begins where a tensor of its own could; and the columns."""
    length = round_up(num_rows, ALIGNMENT)
    stack = torch.empty(len(columns), length, dtype=_WHOLE[columns[0].dtype.itemsize], device=device)
    tensors = [part.view(column.dtype) for part, column in zip(stack.unbind(0), columns, strict=True)]
    for tensor, column in zip(tensors, columns, strict=True):
        tensor.fill_(column.default)
    return stack, [tensor[:num_rows] for tensor in tensors]


def _part(block: torch.Tensor, begin: int, kind: torch.dtype, *shape: int) -> torch.Tensor:
    """What lies in a block from a byte on."""
    return block[begin : begin + prod(shape) * kind.itemsize].view(kind).view(shape)


def _filling(tensor: torch.Tensor, rows: torch.Tensor, value: float) -> _Copy:
    """One launch on a device; on a CPU row by row, which for rows as wide as a vocabulary is nine times as fast."""
    if tensor.is_cpu and tensor[0].numel() >= _WIDE:
        return lambda: [tensor[row].fill_(value) for row in rows.tolist()]
    return partial(tensor.index_fill_, 0, rows, value)


def _repeated(names: Many[str]) -> str:
    return next(name for index, name in enumerate(names) if name in names[:index])
