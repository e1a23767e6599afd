"""Contents: all that a container holds, several levels deep, as a value that can be compared later."""

from __future__ import annotations

import array
import dataclasses
import types
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phonograph.graphs.recording.fact import items_of
from phonograph.graphs.recording.lookup import instance_dict, lookup
from phonograph.graphs.recording.places import ABSENT, PLAIN

CONTAINERS = (list, dict, set, deque, bytearray, array.array, np.ndarray)
_DEPTHS = (32, 6, 3)
"""How many levels are looked at: the most whose values are not too many."""
_MAX_LEAVES = 512
_MAX_ARRAY_BYTES = 1 << 14


class TooLargeError(Exception):
    """A container is too large to be compared at every call."""


def is_container(value: Any) -> bool:
    """Whether a value can be changed in place, and holds others."""
    return isinstance(value, CONTAINERS)


def is_record(value: Any) -> bool:
    """Whether an object is nothing but its fields."""
    return isinstance(value, types.SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module)
    )


@dataclass(frozen=True, slots=True, eq=False)
class AllContents:
    """What a container holds, and what the containers and records in it hold."""

    holder: Any
    depth: int

    @staticmethod
    def of(holder: Any) -> AllContents:
        """With as many levels as can be compared at calls."""
        found = (one for depth in _DEPTHS if (one := AllContents(holder, depth)).get() is not ABSENT)
        return next(found, AllContents(holder, _DEPTHS[0]))

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("contents", id(self.holder))

    def get(self) -> Any:
        return self._frozen()[0]

    def _frozen(self) -> tuple[Any, int]:
        left = [_MAX_LEAVES]
        try:
            return _frozen(self.holder, self.depth, left), _MAX_LEAVES - left[0]
        except (TooLargeError, RuntimeError):  # it may grow, or change while it is read
            return ABSENT, _MAX_LEAVES

    @property
    def num_values(self) -> int:
        """How much there is to compare."""
        return self._frozen()[1]

    def plain_copy(self) -> Any:
        """A copy that `==` can be asked about at every call, which is fast; None where it holds other objects."""
        try:
            return _plain_copy(self.holder, self.depth)
        except TooLargeError:
            return None

    @property
    def is_flat(self) -> bool:
        """Whether Python's own comparison tells a change: plain values alone, that are equal to no other kind."""
        holder = self.holder
        return type(holder) in (list, set) and all(type(one) in _FLAT or isinstance(one, type) for one in holder)


@dataclass(frozen=True, slots=True, eq=False)
class KeptEntries:
    """The entries that a dict had; others may be added."""

    holder: dict[Any, Any]
    keys: tuple[Any, ...]

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("entries", id(self.holder))

    def get(self) -> Any:
        return tuple(dict.get(self.holder, key, ABSENT) for key in self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class IsTrue:
    """Whether a container holds anything."""

    holder: Any

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("truth", id(self.holder))

    def get(self) -> Any:
        return len(self.holder) > 0


@dataclass(frozen=True, slots=True, eq=False)
class LengthOf:
    """How much a container holds."""

    holder: Any

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("length", id(self.holder))

    def get(self) -> Any:
        return len(self.holder)


@dataclass(frozen=True, slots=True, eq=False)
class HasKey:
    """Whether a dict or a set has a plain key."""

    holder: Any
    key: Any

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("has", id(self.holder), self.key)

    def get(self) -> Any:
        return dict.__contains__(self.holder, self.key) if isinstance(self.holder, dict) else self.key in self.holder


@dataclass(frozen=True, slots=True, eq=False)
class InContext:
    """The value of a context variable where it is asked for."""

    holder: ContextVar[Any]

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("context", id(self.holder))

    def get(self) -> Any:
        try:
            return self.holder.get()
        except LookupError:
            return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class InThread:
    """An attribute of a `threading.local`, of the thread that asks."""

    holder: Any
    key: str

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("thread", id(self.holder), self.key)

    def get(self) -> Any:
        return (instance_dict(self.holder) or {}).get(self.key, ABSENT)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the frozen value of a fact."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors_in(one)


def _frozen(value: Any, depth: int, left: list[int]) -> Any:
    """A value of tuples with the same leaves; equal ones come of equal contents."""
    left[0] -= 1
    if left[0] < 0:
        raise TooLargeError
    if isinstance(value, PLAIN) or depth == 0:
        return value
    if isinstance(value, list | tuple | deque):
        return type(value), *(_frozen(one, depth - 1, left) for one in value)
    if isinstance(value, dict):
        return type(value), *((key, _frozen(one, depth - 1, left)) for key, one in items_of(value))
    if isinstance(value, set):
        left[0] -= len(value)
        return type(value), frozenset(value)
    if isinstance(value, np.ndarray):
        return _frozen_array(value, depth, left)
    if isinstance(value, bytearray | array.array):
        return _frozen_bytes(value)
    return _frozen_record(value, depth, left) if is_record(value) else value


def _plain_copy(value: Any, depth: int) -> Any:
    if type(value) in (str, int, float, bool, bytes, type(None)):
        return value
    if depth == 0 or type(value) not in (list, tuple, dict, set):
        raise TooLargeError
    if isinstance(value, dict):
        return {_plain_copy(key, 1): _plain_copy(one, depth - 1) for key, one in value.items()}
    copies = [_plain_copy(one, depth - 1) for one in value]
    return copies if type(value) is list else tuple(copies) if type(value) is tuple else set(copies)


def _frozen_array(value: Any, depth: int, left: list[int]) -> Any:
    if value.nbytes > _MAX_ARRAY_BYTES:
        raise TooLargeError
    if value.dtype.hasobject or (value.dtype.names is not None and value.size <= _MAX_LEAVES):
        held = _frozen(value.tolist(), depth, left)  # the items of an array with fields are no copies
    else:
        held = (*value.flat,) if value.size <= _MAX_LEAVES else value.tobytes()
    return np.ndarray, value.shape, str(value.dtype), held


def _frozen_bytes(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    if value.itemsize * len(value) > _MAX_ARRAY_BYTES:
        raise TooLargeError
    return array.array, value.typecode, tuple(value) if len(value) <= _MAX_LEAVES else value.tobytes()


def _frozen_record(value: Any, depth: int, left: list[int]) -> Any:
    return type(value), *((key, _frozen(one, depth - 1, left)) for key, one in fields_of(value).items())


def fields_of(record: Any) -> dict[str, Any]:
    """What a record holds, by name; of a dataclass with slots, what lies in these."""
    held = instance_dict(record)
    if held is not None or not dataclasses.is_dataclass(record):
        return held or {}
    places = ((one.name, lookup(record, one.name)) for one in dataclasses.fields(record))
    return {name: found[-1].value for name, found in places if found}


_FLAT = frozenset({str, int, type(None)})
