"""RequestTables: request state on the device, a row per sequence, in tensors made from columns. Row 0 is null."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from phonograph.devices import Device
from phonograph.engine.state.column import Access, Array, Column, Form, Group, TableSizes, TrialRows, Writer
from phonograph.engine.state.updates import TableUpdates, Write
from phonograph.errors import DeclarationError, allocating
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.registry import LoadCounts, LoadMode, Registry
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.sizes import next_power_of_two, round_up

_ALIGNMENT = 16
_SMALLEST = 256
_WIDE = 4096


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
        self._stacks: dict[str, list[_Stack]] = {}
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
        return self._by_group[group.name][0].name in self._tensors

    def make_all(self) -> None:
        """Make every group, for recordings that read them."""
        for name in self._by_group:
            self.make(name)

    def make(self, group: str) -> None:
        """Make the tensors of a group, if they are not there."""
        columns, on, size = self._by_group[group], self._device.torch_device, self.sizes.max_seqs + 1
        if columns[0].name in self._tensors:
            return
        with (
            allocating(f"{group} for {self.sizes.max_seqs:,} sequences", "Lower max_seqs."),
            torch.inference_mode(False),
        ):
            stacks = [_Stack.of(together, size, on) for together in _written_together(columns)]
            made = {name: tensor for stack in stacks for name, tensor in stack.columns.items()}
            for column in columns:
                shape = (size,) if column.width == 1 else (size, self.sizes.width(column.width))
                if column.name not in made:
                    made[column.name] = torch.full(shape, column.default, dtype=column.dtype, device=on)
        self._tensors |= made
        self._stacks[group] = stacks

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
        block, resets = _Block(), list[tuple[str, int, Array]]()
        stacked = [self._stacked(write) for write in updates.writes]
        for name in self._by_group if updates.entered else ():
            leaving, fresh = self._resets(name, updates)
            if leaving or fresh:
                rows = np.asarray([*leaving, *fresh], dtype=np.int64)
                block.add(rows)
                resets.append((name, len(leaving), rows))
        for write, stacks in zip(updates.writes, stacked, strict=True):
            block.add_all(write, stacks)
        if not block.num_bytes:
            return
        sizes = {"bytes": block.num_bytes}
        view = self._registry.load({"block": block.packed()}, Extent(sizes, sizes), mode=LoadMode.EAGER)
        parts = _Parts(block, view.batch["block"])
        for name, in_force in self._in_force.items():
            in_force.update(_written(name, updates))  # before they are: what raises half-way leaves something there
        for name, num_leaving, rows in resets:
            self._reset(name, num_leaving, parts.of(rows))
        for write, stacks in zip(updates.writes, stacked, strict=True):
            self._write(write, stacks, parts)
        for name, in_force in self._in_force.items():
            in_force.difference_update(set(updates.entered) - _written(name, updates))

    def _stacked(self, write: Write) -> _Stacked:
        """The values of columns that lie together, in one array each."""
        return [
            (stack, np.array([write.values[name] for name in stack.columns]))
            for stack in self._stacks[write.group]
            if stack.columns.keys() <= write.values.keys()
        ]

    def _resets(self, name: str, updates: TableUpdates) -> tuple[list[int], list[int]]:
        """(rows whose new owner does not ask for what the last one left in the group, rows of new owners that ask)."""
        columns = self._by_group[name]
        if columns[0].group.asked is None:
            return [], list(updates.entered) if any(Form.RESET in column.form for column in columns) else []
        asking = _written(name, updates)
        left = self._in_force[name].difference(asking).intersection(updates.entered)
        return sorted(left), [row for row in updates.entered if row in asking]

    def _reset(self, name: str, num_leaving: int, rows: torch.Tensor) -> None:
        for column in self._by_group[name]:
            # Of a row whose owner asks, the host sends the rest.
            to_reset = rows if Form.RESET in column.form else rows[:num_leaving]
            if to_reset.shape[0]:
                _fill_rows(self[column.name], to_reset, column.default)

    def _write(self, write: Write, stacks: _Stacked, parts: _Parts) -> None:
        if write.values:
            rows = parts.of(write.rows)
            for stack, values in stacks:
                stack.tensor.index_copy_(1, rows, parts.of(values).view(values.shape))
            for name, values in _alone(write, stacks):
                self[name].index_copy_(0, rows, parts.of(values).view(values.shape))
        for name, (places, values) in write.pairs.items():
            if len(places):
                self[name].view(-1).index_copy_(0, parts.of(places), parts.of(values))

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

    def live_rows(self, count: int) -> dict[str, torch.Tensor]:
        """The first `count` rows of every column that there is, without the null row."""
        return {name: tensor[1 : count + 1] for name, tensor in self._tensors.items()}

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


@dataclass(frozen=True)
class _Stack:
    """Columns of one dtype that the host writes together, in one tensor: one copy on the device writes them all."""

    tensor: torch.Tensor  # [num_columns, num_rows], rounded up so that each begins where a tensor of its own could
    columns: dict[str, torch.Tensor]

    @staticmethod
    def of(columns: Many[Column], num_rows: int, device: torch.device) -> _Stack:
        length = -(-num_rows // _ALIGNMENT) * _ALIGNMENT
        tensor = torch.empty(len(columns), length, dtype=columns[0].dtype, device=device)
        for part, column in zip(tensor, columns, strict=True):
            part.fill_(column.default)
        named = zip(columns, tensor.unbind(0), strict=True)
        return _Stack(tensor, {column.name: part[:num_rows] for column, part in named})


_Stacked = list[tuple[_Stack, Array]]


def _written_together(columns: Many[Column]) -> list[list[Column]]:
    found: dict[torch.dtype, list[Column]] = {}
    for column in columns:
        if column.width == 1 and column.form == Form.ROW and Writer.ENTRY in column.writer:
            found.setdefault(column.dtype, []).append(column)
    return list(found.values())


def _alone(write: Write, stacks: _Stacked) -> list[tuple[str, Array]]:
    """The values that are in no stack."""
    together = {name for stack, _ in stacks for name in stack.columns}
    return [(name, values) for name, values in write.values.items() if name not in together]


class _Block:
    """Arrays that go over in one transfer: where each of them lies."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, Array]] = {}
        self._end = 0

    def add_all(self, write: Write, stacks: _Stacked) -> None:
        """What a write consists of."""
        if write.values:
            self.add(write.rows)
        for _, values in (*stacks, *_alone(write, stacks)):
            self.add(values)
        for places, values in write.pairs.values():
            self.add(places)
            self.add(values)

    def add(self, array: Array) -> None:
        """Give an array its place."""
        self._parts[id(array)] = self._end, array
        self._end += round_up(array.nbytes, _ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Rounded up by an eighth at most, so that few layouts serve all sizes."""
        if self._end <= _SMALLEST:
            return _SMALLEST if self._end else 0
        grain = next_power_of_two(self._end) // 8
        return round_up(self._end, grain)

    def packed(self) -> Array:
        """All of them in one array of bytes."""
        block = np.zeros(self.num_bytes, dtype=np.uint8)
        for start, array in self._parts.values():
            block[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return block

    def start(self, array: Array) -> int:
        """The first byte of an array."""
        return self._parts[id(array)][0]


class _Parts:
    """The arrays of a block where they came to lie on the device."""

    def __init__(self, block: _Block, loaded: torch.Tensor) -> None:
        self._block = block
        self._loaded = loaded
        self._typed: dict[np.dtype[Any], torch.Tensor] = {}

    def of(self, array: Array) -> torch.Tensor:
        """An array as a flat tensor."""
        typed = self._typed.get(array.dtype)
        if typed is None:
            typed = self._typed[array.dtype] = self._loaded.view(_torch_dtype(array.dtype))
        first = self._block.start(array) // array.itemsize
        return typed[first : first + array.size]


def _fill_rows(tensor: torch.Tensor, rows: torch.Tensor, value: float) -> None:
    """One launch on a device; on a CPU row by row, which for rows as wide as a vocabulary is nine times as fast."""
    if tensor.is_cpu and tensor[0].numel() >= _WIDE:
        for row in rows.tolist():
            tensor[row] = value
    else:
        tensor.index_fill_(0, rows, value)


def _written(group: str, updates: TableUpdates) -> set[int]:
    return {int(row) for write in updates.writes if write.group == group for row in write.rows}


def _repeated(names: Many[str]) -> str:
    return next(name for index, name in enumerate(names) if name in names[:index])


@cache
def _torch_dtype(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype=kind)).dtype
