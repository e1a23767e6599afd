"""ValueTrace: the ops of one run, with copies of what each reads and gives, to find where two runs part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from phonograph.devices.launches import following_launches
from phonograph.devices.op_trace import calling_frame, op_name
from phonograph.devices.trace import tensors_in, watching_ops, written_tensors
from phonograph.errors import Frame

_MAX_OPS = 20_000
_MAX_BYTES = 1 << 30
"""Of all copies of a run: what comes after them is not looked at."""
_MAX_VALUE_BYTES = 64 << 20

Place = tuple[int, bool, int]
"""The number of an op, whether it reads the value, and which one it is."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor that an op read or gave."""

    memory: int
    shape: tuple[int, ...]
    content: torch.Tensor | None
    """A copy; None where there is none: it is too large, or no plain tensor."""


@dataclass(frozen=True, eq=False, slots=True)
class RanOp:
    """One op, as it ran."""

    name: str
    frame: Frame | None
    reads: tuple[Value, ...]
    """Of memory that the run has made or written: all other is the same in every run, as far as rows are used."""
    gives: tuple[Value, ...]
    """Its results, and what it wrote."""
    draws: bool
    """Whether it draws random numbers."""

    def __str__(self) -> str:
        return f"{self.name} ({self.frame})"


@dataclass(eq=False)
class ValueTrace:
    """The ops of one run, in order, as far as there is room for them."""

    ops: list[RanOp] = field(default_factory=list)
    is_cut_short: bool = False
    _touched: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Memory that ops made or wrote; held weakly, so that its number is not reused."""
    _copies: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    """By memory, its last writer and the form of a tensor: most of what is read was just given."""
    _writers: dict[int, int] = field(default_factory=dict)
    _num_bytes: int = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, every op is noted."""
        noted: list[tuple[Value, ...]] = []

        def before(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            given = [one for one in tensors_in((args, kwargs)) if _memory_of(one) in self._touched]
            noted.append(tuple(map(self._value, given)))

        def after(func: Any, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
            reads = noted.pop()
            self.is_cut_short |= len(self.ops) >= _MAX_OPS
            if not self.is_cut_short:
                written = list(written_tensors(func, args, kwargs))
                self._note(func, reads, list(tensors_in(result)), written)

        def launched(name: str, grid: Any, arguments: Any) -> None:
            self.is_cut_short = True  # what a kernel reads and writes no op tells: whoever is blamed may be innocent

        with following_launches(launched), watching_ops(before, after):
            yield

    def values(self) -> dict[Place, torch.Tensor]:
        """All copies, by place."""
        return {
            (number, is_read, index): value.content
            for number, op in enumerate(self.ops)
            for is_read, values in ((True, op.reads), (False, op.gives))
            for index, value in enumerate(values)
            if value.content is not None
        }

    def _note(
        self, func: Any, reads: tuple[Value, ...], results: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        known = set(self._touched)
        for tensor in (*results, *written):
            self._touch(tensor)
        for tensor in (*written, *(one for one in results if _memory_of(one) not in known)):
            self._writers[_memory_of(tensor)] = len(self.ops)
        gives = {id(tensor): tensor for tensor in (*results, *written)}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        noted = tuple(map(self._value, gives.values()))
        self.ops.append(RanOp(op_name(func), calling_frame(), reads, noted, draws))

    def _touch(self, tensor: torch.Tensor) -> None:
        memory = _memory_of(tensor)
        if memory and memory not in self._touched:
            self._touched[memory] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _value(self, tensor: torch.Tensor) -> Value:
        memory = _memory_of(tensor)
        shape = tuple(tensor.shape) if not tensor.is_nested else ()
        if not memory or tensor.is_meta or tensor.nbytes > _MAX_VALUE_BYTES:
            return Value(memory, shape, None)
        key = (memory, self._writers.get(memory), tensor.storage_offset(), shape, tensor.stride(), tensor.dtype)
        content = self._copies.get(key)
        if content is None and self._num_bytes + tensor.nbytes <= _MAX_BYTES:
            with torch.no_grad(), _disable_current_modes():
                content = self._copies[key] = tensor.detach().clone()
            self._num_bytes += tensor.nbytes
        return Value(memory, shape, content)


def _memory_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's memory; 0 where it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def memories_of(values: Mapping[Any, Any]) -> set[int]:
    """The memory of those values that are tensors."""
    return {_memory_of(value) for value in values.values() if isinstance(value, torch.Tensor)} - {0}
