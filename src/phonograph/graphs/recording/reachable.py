"""Reachable state: the Python objects that a body can reach, with a copy of what each holds."""

from __future__ import annotations

import dis
import enum
import functools
import io
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from phonograph.graphs.recording.fact import shown
from phonograph.graphs.recording.places import (
    PLAIN,
    STATEFUL,
    Attributes,
    Data,
    Items,
    Named,
    Place,
    Whole,
    class_names,
)

_MAX_PLACES = 500_000
_MAX_ARRAY_BYTES = 1 << 20
# Modules whose objects are traversed; others of the standard library (locks, loggers, files) hold no model state.
_OPEN_MODULES = {"collections", "types", "weakref", "argparse", "functools"}
_CLOSED_PACKAGES = ({"torch", "numpy", "phonograph", "builtins"} | sys.stdlib_module_names) - _OPEN_MODULES


@dataclass(frozen=True)
class StateChange:
    """A value that differs from the snapshot."""

    place: Place
    key: Any
    then: Any
    now: Any
    name: str

    def undo(self) -> None:
        self.place.put(self.key, self.then)

    def redo(self) -> None:
        self.place.put(self.key, self.now)


@dataclass(eq=False, slots=True)
class _Found:
    """How a place was reached: the place before it, and the key there."""

    place: Place
    before: _Found | None
    key: Any
    name: str
    """A name of its own, where that says more than the path to it."""


class Snapshot:
    """A snapshot of the objects that a body can reach. Taking it runs none of their code.

    Roots are functions, objects and containers; the globals that functions use are added as these run.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        """Tensors that were met, all but parameters."""
        self.iterators: list[str] = []
        """Iterators that were met: their position can be neither read nor put back."""
        self.lazy: list[str] = []
        """Parameters and buffers without a shape that were met: the first call makes them, which can't be undone."""
        self.packages: set[str] = set()
        """Where the objects and functions that were met come from."""
        self._found: dict[tuple[int, type], _Found] = {}
        self._met: dict[int, Any] = {}
        self._visitors: dict[type, _Visit | None] = {}
        self._todo: deque[tuple[Any, _Found | None, Any]] = deque()
        self._add(Whole(random._inst), None, None, "random")
        self._add(Whole(np.random.mtrand._rand), None, None, "numpy.random")

    @property
    def is_cut_short(self) -> bool:
        return len(self._met) >= _MAX_PLACES

    def reach(self, roots: Iterable[Any]) -> None:
        """Add what can be reached from here, as it is now; what is known already stays as it was."""
        self._todo.extend((root, None, None) for root in roots)
        self._walk()

    def reach_globals(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Add the globals that a function uses, and of modules among them what it may use."""
        # Names for `globals()` stand among the constants.
        texts = [one for one in code.co_consts if isinstance(one, str) and one in namespace]
        by_name = texts if not _GLOBALS.isdisjoint(code.co_names) else []
        self._add_names(namespace, (*code.co_names, *by_name), str(namespace.get("__name__", "")))
        for value in (*map(namespace.get, code.co_names), *map(sys.modules.get, _imported(code))):
            if isinstance(value, types.ModuleType) and not (_is_closed(value.__name__) or is_importing(vars(value))):
                self._add_names(vars(value), code.co_names, value.__name__)
        self._walk()

    def changes(self) -> list[StateChange]:
        """All that differs now."""
        return [
            StateChange(found.place, key, then, now, _name_of(found, key))
            for found in list(self._found.values())
            for key, then, now in found.place.changed()
        ]

    def restore(self) -> None:
        """Put everything back."""
        for found in list(self._found.values()):
            found.place.restore()

    def way_to(self, change: StateChange) -> Iterator[tuple[Place, Any]]:
        """The places on the way to a change, the nearest first, each with the key that was taken there."""
        found, key = self._found.get(_identity(change.place)), change.key
        while found is not None:
            yield found.place, key
            key, found = found.key, found.before

    def name_of_memory(self, storage: torch.UntypedStorage) -> str:
        """What a tensor over this memory is called where it was met, or nothing."""
        for found in self._found.values():
            then = getattr(found.place, "then", None)
            held = then.items() if isinstance(then, dict) else enumerate(then if isinstance(then, list) else [then])
            for key, value in held:
                is_tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided
                if is_tensor and value.untyped_storage()._cdata == storage._cdata:
                    return _name_of(found, key if isinstance(then, dict | list) else None)
        return ""

    def newest_like(self, change: StateChange) -> StateChange:
        """The same change of the object that was met last by the same name."""
        for found in reversed(self._found.values()):
            if type(found.place) is type(change.place) and _name_of(found, change.key) == change.name:
                return replace(change, place=found.place)
        return change

    def known(self, place: Place) -> Place | None:
        """The place of the same object in this snapshot."""
        found = self._found.get(_identity(place))
        return found.place if found is not None else None

    # -- the walk -----------------------------------------------------------------------------------------

    def _walk(self) -> None:
        while self._todo:
            value, before, key = self._todo.popleft()
            kind = type(value)
            visit = self._visitors[kind] if kind in self._visitors else self._visitors.setdefault(kind, _visitor(kind))
            if visit is None or id(value) in self._met or self.is_cut_short:
                continue
            self._met[id(value)] = value  # held, so that its id() is not reused
            visit(self, value, before, key)

    def _add(self, place: Place, before: _Found | None, key: Any, name: str = "") -> _Found:
        found = self._found[_identity(place)] = _Found(place, before, key, name)
        return found

    def _next(self, values: Iterable[tuple[Any, Any]], before: _Found | None) -> None:
        self._todo.extend((value, before, key) for key, value in values if type(value) not in _LEAVES)

    def _add_names(self, namespace: dict[str, Any], names: Iterable[str], module: str) -> None:
        found = self._found.get((id(namespace), Named))
        if found is None:
            found = self._add(Named(namespace, ()), None, None, module.rpartition(".")[2])
        assert isinstance(found.place, Named)
        added = found.place.extend(names)
        self._next(((name, found.place.get(name)) for name in added), found)

    def _visit_mapping(self, value: Any, before: _Found | None, key: Any) -> None:
        place = Items(value, value)
        self._next(place.then.items(), self._add(place, before, key))
        self._visit_attributes(value, before, key)

    def _visit_sequence(self, value: Any, before: _Found | None, key: Any) -> None:
        place = Whole(value)
        self._next(enumerate(place.then), self._add(place, before, key))
        self._visit_attributes(value, before, key)

    def _visit_tuple(self, value: Any, before: _Found | None, key: Any) -> None:
        self._todo.extend((item, before, key) for item in value if type(item) not in _LEAVES)
        self._visit_attributes(value, before, key)

    def _visit_attributes(self, value: Any, before: _Found | None, key: Any) -> None:
        """What a container of a user's class has besides its items."""
        held, kind = getattr(value, "__dict__", None), type(value)
        if isinstance(held, dict) and not _is_closed(kind.__module__):
            place = Attributes(value, held)
            self._next(place.then.items(), self._add(place, before, key, kind.__name__))
            self._todo.append((kind, None, None))

    def _visit_state(self, value: Any, before: _Found | None, key: Any) -> None:
        if isinstance(value, np.ndarray) and (value.nbytes > _MAX_ARRAY_BYTES or not value.flags.writeable):
            return
        with suppress(RuntimeError):  # a generator of a device that captures does not tell its state
            self._add(Whole(value), before, key)

    def _visit_tensor(self, value: torch.Tensor, before: _Found | None, key: Any) -> None:
        if not isinstance(value, torch.nn.Parameter):
            self.tensors[id(value)] = value
        name = _name_of(before, key) if before is not None else type(value).__name__
        place = Items(value, value.__dict__)
        self._next(place.then.items(), self._add(place, before, key, name))
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            self.lazy.append(name)
        elif type(value) in _PLAIN_TENSORS and value.layout is torch.strided:
            self._add(Data(value), before, key, name)
        if value.requires_grad and value.is_leaf:
            self._add(Named(value, ("grad",)), before, key, name)

    def _visit_iterator(self, value: Any, before: _Found | None, key: Any) -> None:
        self.iterators.append(_name_of(before, key) if before is not None else type(value).__name__)

    def _visit_function(self, value: types.FunctionType, before: _Found | None, key: Any) -> None:
        self.packages.add(str(value.__module__).partition(".")[0])
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=False):
            if (id(cell), Whole) not in self._found:
                place = Whole(cell)
                self._next([(None, place.then)], self._add(place, None, None, name))
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        self._next(((None, default) for default in defaults), before)
        self._visit_object(value, before, key)  # it may get its first attribute

    def _visit_method(self, value: types.MethodType, before: _Found | None, key: Any) -> None:
        self._todo.extend((part, before, key) for part in (value.__self__, value.__func__))

    def _visit_bound(self, value: Any, before: _Found | None, key: Any) -> None:
        self._todo.append((value.__self__, before, key))

    def _visit_partial(self, value: Any, before: _Found | None, key: Any) -> None:
        self._todo.extend((part, before, key) for part in (value.func, value.args, value.keywords))

    def _visit_wrapper(self, value: Any, before: _Found | None, key: Any) -> None:
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        self._todo.append((wrapped, before, key))

    def _visit_reference(self, value: Any, before: _Found | None, key: Any) -> None:
        self._todo.append((value(), before, key))

    def _visit_object(self, value: Any, before: _Found | None, key: Any) -> None:
        name = type(value).__name__ if not isinstance(value, types.FunctionType) else value.__name__
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            place = Items(value, held)
            found = self._add(place, before, key, name)
            self._next(place.then.items(), found)
        slots = _slots(type(value))
        if slots:
            named = Named(value, slots)
            self._next(named.then.items(), self._add(named, before, key, name))
        self._todo.append((type(value), None, None))

    def _visit_class(self, value: type, before: _Found | None, key: Any) -> None:
        for one in value.__mro__:
            self.packages.add(one.__module__.partition(".")[0])
            if not _is_closed(one.__module__) and (id(one), Named) not in self._found:
                place = Named(one, sorted(class_names(one)))
                self._next(place.then.items(), self._add(place, None, None, one.__name__))
                self._next(((None, method) for method in _special_methods(one)), None)

    def _visit_descriptor(self, value: Any, before: _Found | None, key: Any) -> None:
        parts = (getattr(value, name, None) for name in ("__func__", "fget", "fset", "func"))
        self._todo.extend((part, None, None) for part in parts)


_Visit = Callable[[Snapshot, Any, _Found | None, Any], None]
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LEAVES = frozenset({*PLAIN, types.BuiltinFunctionType, types.ModuleType})
_BY_TYPE: tuple[tuple[Any, _Visit], ...] = (
    (torch.Tensor, Snapshot._visit_tensor),
    (STATEFUL, Snapshot._visit_state),
    (dict, Snapshot._visit_mapping),
    ((list, deque), Snapshot._visit_sequence),
    (tuple, Snapshot._visit_tuple),
    (types.FunctionType, Snapshot._visit_function),
    (types.MethodType, Snapshot._visit_method),
    (types.MethodWrapperType, Snapshot._visit_bound),
    (functools.partial, Snapshot._visit_partial),
    (functools._lru_cache_wrapper, Snapshot._visit_wrapper),
    (weakref.ref, Snapshot._visit_reference),
    (type, Snapshot._visit_class),
    ((staticmethod, classmethod, property, functools.cached_property), Snapshot._visit_descriptor),
    ((torch.nn.Module, torch.optim.Optimizer, threading.local, threading.Event, queue.Queue), Snapshot._visit_object),
)


def _visitor(kind: type) -> _Visit | None:
    """How objects of a type are traversed; None for those that hold nothing of interest."""
    if issubclass(kind, (*PLAIN, enum.Enum, types.ModuleType, io.IOBase)):
        return None
    for kinds, visit in _BY_TYPE:
        if issubclass(kind, kinds):
            return visit
    if kind.__module__.startswith("phonograph."):
        return Snapshot._visit_wrapper  # the wrapper around a user's function or module is ours, what it wraps is not
    if _is_closed(kind.__module__):
        return Snapshot._visit_iterator if hasattr(kind, "__next__") else None
    return Snapshot._visit_object


def _imported(code: types.CodeType) -> list[str]:
    """The modules that a function imports itself, or names for `sys.modules` and `importlib`."""
    found = []
    if _IMPORTS in code.co_code[::2]:
        found = [str(one.argval) for one in dis.get_instructions(code) if one.opcode == _IMPORTS]
    if not _BY_TEXT.isdisjoint(code.co_names):
        found += [one for one in code.co_consts if isinstance(one, str)]
    return found


_IMPORTS = dis.opmap["IMPORT_NAME"]
_BY_TEXT = {"modules", "import_module", "__import__"}
_GLOBALS = {"globals", "__globals__", "f_globals"}


def _special_methods(kind: type) -> Iterator[types.FunctionType]:
    """Methods that Python calls by itself, of those that may keep something in a closure."""
    for name, value in vars(kind).items():
        method = getattr(value, "__func__", value)  # of a class method
        if name.startswith("__") and isinstance(method, types.FunctionType) and method.__closure__:
            yield method


def _slots(kind: type) -> tuple[str, ...]:
    members = [name for one in kind.__mro__ if not _is_closed(one.__module__) for name in _members(one)]
    return tuple(dict.fromkeys(members))


def _members(kind: type) -> Iterator[str]:
    return (name for name, value in vars(kind).items() if isinstance(value, types.MemberDescriptorType))


@functools.cache
def _is_closed(module: str) -> bool:
    return str(module).partition(".")[0] in _CLOSED_PACKAGES


def is_importing(namespace: dict[str, Any]) -> bool:
    """Whether a module is not complete yet."""
    return bool(getattr(namespace.get("__spec__"), "_initializing", False))


def _identity(place: Place) -> tuple[int, type]:
    return id(place.holder), type(place)


def _name_of(found: _Found, key: Any) -> str:
    base = found.name
    if not base:
        if found.before is None:
            base = type(found.place.holder).__name__
        elif found.key in _MODULE_DICTS and isinstance(found.before.place.holder, torch.nn.Module):
            base, key = _name_of(found.before, None), _Attribute(key)
        else:
            base = _name_of(found.before, found.key)
    if key is None:
        return base
    return f"{base}.{key}" if found.name or isinstance(key, _Attribute) else f"{base}[{shown(key)}]"


_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


class _Attribute(str):
    """A key that reads as an attribute."""
