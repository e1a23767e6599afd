"""Places: where Python keeps values (attributes, items, cells, globals); how they are copied, compared and restored."""

from __future__ import annotations

import array
import functools
import queue
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, np.generic)
_DEPTH = 5


class _Absent:
    """Stands for a key, attribute or cell that holds nothing."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Place(Protocol):
    """One object that holds values, and a copy of what it held."""

    holder: Any

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, old value, new value) of all that differs; where order matters, the key is None, for the whole."""
        ...

    def get(self, key: Any) -> Any:
        """What a key holds now."""
        ...

    def restore(self) -> None:
        """Put everything back."""
        ...

    def put(self, key: Any, value: Any) -> None:
        """Set one key, without running user code; `ABSENT` removes it."""
        ...


class Items:
    """A dict, or the `__dict__` of an object."""

    def __init__(self, holder: Any, mapping: dict[Any, Any]) -> None:
        self.holder = holder
        self._mapping = mapping
        self._type = OrderedDict if isinstance(mapping, OrderedDict) else dict
        self.then = dict(mapping.items() if self._type is OrderedDict else dict.items(mapping))

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        then, now = self.then, self._mapping
        if len(now) == len(then) and all(map(is_, dict.values(now), then.values())) and all(map(is_, now, then)):
            return
        for key, value in then.items():
            found = dict.get(now, key, ABSENT)
            if not same(value, found):
                yield key, value, found
        for key in now.keys() - then.keys():
            yield key, ABSENT, dict.get(now, key, ABSENT)

    def get(self, key: Any) -> Any:
        return dict.get(self._mapping, key, ABSENT)

    def put(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            self._type.__setitem__(self._mapping, key, value)
        elif key in self._mapping:
            self._type.__delitem__(self._mapping, key)

    def restore(self) -> None:
        if any(True for _ in self.changed()):
            self._type.clear(self._mapping)
            for key, value in self.then.items():
                self._type.__setitem__(self._mapping, key, value)


class Attributes(Items):
    """The `__dict__` of an object that is a dict or a list, and has a place as such."""


class Named:
    """Names of a namespace: globals that functions use, the attributes of a class, the slots of an object."""

    def __init__(self, holder: Any, names: Iterable[str]) -> None:
        self.holder = holder
        self.then: dict[str, Any] = {}
        self.extend(names)

    def extend(self, names: Iterable[str]) -> list[str]:
        """Look at more names; returns those that are new."""
        added = [name for name in names if name not in self.then]
        self.then.update((name, self.get(name)) for name in added)
        return added

    def get(self, key: Any) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(key, ABSENT)
        if isinstance(self.holder, type):
            return vars(self.holder).get(key, ABSENT)
        try:
            return object.__getattribute__(self.holder, key)
        except AttributeError:
            return ABSENT

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        then = self.then
        if isinstance(self.holder, type):
            then = then | dict.fromkeys(class_names(self.holder) - then.keys(), ABSENT)
        for name, value in then.items():
            found = self.get(name)
            if found is not value and not same(value, found):
                yield name, value, found

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.holder, dict):
            # A global that appeared stays: an import may have made it, and modules are not imported twice.
            if value is not ABSENT:
                self.holder[key] = value
            return
        change = type if isinstance(self.holder, type) else object
        if value is not ABSENT:
            change.__setattr__(self.holder, key, value)
        elif self.get(key) is not ABSENT:
            change.__delattr__(self.holder, key)

    def restore(self) -> None:
        for name, value, _ in list(self.changed()):
            self.put(name, value)


def class_names(holder: type) -> set[str]:
    """The attributes of a class that its authors gave it; Python adds others of its own, some of them late."""
    return {name for name in vars(holder) if not (name.startswith("__") or name == "_abc_impl")}


class Whole:
    """A holder without keys: a list, a set, a cell, an array, a random generator."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.then = self.get(None)

    def get(self, key: Any) -> Any:
        holder = self.holder
        if isinstance(holder, types.CellType):
            try:
                return holder.cell_contents
            except ValueError:
                return ABSENT
        if isinstance(holder, list | deque):
            return list(holder)
        return _state_of(holder)

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        holder = self.holder
        if isinstance(holder, list | deque) and len(holder) == len(self.then) and all(map(is_, holder, self.then)):
            return
        now = self.get(None)
        if not (self.then == now if isinstance(holder, random.Random) else same(self.then, now)):
            yield None, self.then, now

    def put(self, key: Any, value: Any) -> None:
        holder = self.holder
        if isinstance(holder, types.CellType):
            if value is ABSENT:
                del holder.cell_contents
            else:
                holder.cell_contents = value
        elif isinstance(holder, list):
            list.__setitem__(holder, slice(None), value)
        elif isinstance(holder, deque):
            deque.clear(holder)
            deque.extend(holder, value)
        else:
            _put_state(holder, value)

    def restore(self) -> None:
        for _, value, _ in list(self.changed()):
            self.put(None, value)


@dataclass(frozen=True)
class Memory:
    """The memory that a tensor is of."""

    number: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: torch.UntypedStorage
    """Held, so that no other memory gets its number."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        return Memory(
            storage._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype, storage
        )


class Data:
    """Which memory a tensor is of: `data` and `set_` replace it."""

    def __init__(self, holder: torch.Tensor) -> None:
        self.holder = holder
        self.then = Memory.of(holder)

    def get(self, key: Any) -> Any:
        return Memory.of(self.holder)

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        now = self.get(None)
        if self.then.number != now.number or not same(self.then, now):
            yield "data", self.then, now

    def put(self, key: Any, value: Any) -> None:
        empty = torch.empty(0, dtype=value.dtype, device=value.storage.device)
        self.holder.data = empty.set_(value.storage, value.offset, value.shape, value.stride)

    def restore(self) -> None:
        for key, value, _ in list(self.changed()):
            self.put(key, value)


_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
STATEFUL = (set, bytearray, array.array, np.ndarray, ContextVar, queue.SimpleQueue, *_RANDOM)
"""Types without keys whose content is copied whole."""


def _state_of(holder: Any) -> Any:
    if isinstance(holder, random.Random):
        return holder.getstate()
    if isinstance(holder, np.random.Generator):
        return holder.bit_generator.state
    if isinstance(holder, np.random.RandomState):
        return holder.get_state()
    if isinstance(holder, torch.Generator):
        return holder.get_state().numpy().tobytes()
    if isinstance(holder, np.ndarray):
        return holder.copy()
    if isinstance(holder, ContextVar):
        return _in_context(holder)
    if isinstance(holder, queue.SimpleQueue):
        return _queued(holder)
    return set(holder) if isinstance(holder, set) else bytes(holder)


def _in_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return ABSENT


def _queued(holder: queue.SimpleQueue[Any]) -> list[Any]:
    """What waits in a queue. It can only be taken out, and is put in again."""
    found = _emptied(holder)
    for one in found:
        holder.put(one)
    return found


def _emptied(holder: queue.SimpleQueue[Any]) -> list[Any]:
    found: list[Any] = []
    with suppress(queue.Empty):
        while True:
            found.append(holder.get_nowait())
    return found


def _put_state(holder: Any, state: Any) -> None:
    if isinstance(holder, random.Random):
        holder.setstate(state)
    elif isinstance(holder, np.random.Generator):
        holder.bit_generator.state = state
    elif isinstance(holder, np.random.RandomState):
        holder.set_state(state)
    elif isinstance(holder, torch.Generator):
        holder.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(holder, np.ndarray):
        holder[...] = state
    elif isinstance(holder, ContextVar):
        if state is not ABSENT:  # nothing but a token takes a value away
            holder.set(state)
    elif isinstance(holder, queue.SimpleQueue):
        _emptied(holder)
        for one in state:
            holder.put(one)
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, state)
    elif isinstance(holder, array.array):
        del holder[:]
        holder.frombytes(state)
    else:
        holder[:] = state


def same(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether replacing one value by the other changes nothing: equal plain values, or the same memory."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) if not isinstance(one, float) else repr(one) == repr(other)
    if isinstance(one, torch.Tensor):
        return _same_memory(one, other)
    if isinstance(one, torch.UntypedStorage):
        return bool(one._cdata == other._cdata)
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return depth > 0 and _same_parts(one, other, depth - 1)


def _same_parts(one: Any, other: Any, depth: int) -> bool:
    if isinstance(one, tuple | list | deque):
        return len(one) == len(other) and all(same(a, b, depth) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key], depth) for key, value in one.items())
    if isinstance(one, set | frozenset):
        return bool(one == other)
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if isinstance(one, types.FunctionType):
        cells = [tuple(map(_content, function.__closure__ or ())) for function in (one, other)]
        return one.__code__ is other.__code__ and same(cells[0], cells[1], depth)
    if isinstance(one, functools.partial):
        return same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), depth)
    held = getattr(one, "__dict__", None)
    return isinstance(held, dict) and not isinstance(one, type) and same(held, other.__dict__, depth)


def _content(cell: types.CellType) -> Any:
    return Whole(cell).then


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    is_alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return is_alike and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
