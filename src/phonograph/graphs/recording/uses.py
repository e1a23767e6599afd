"""Uses: what a body reads by calls into closed code, by operators, by keys that it computes, and by asking for truth.

Code that is looked into shows its reads itself. Of what is passed to other code (Python's builtins, torch, the standard
library), all that a container holds counts as read.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch

from phonograph.graphs.recording import modes
from phonograph.graphs.recording.bytecode import UNPACKED, Read
from phonograph.graphs.recording.contents import (
    AllContents,
    HasKey,
    InContext,
    IsTrue,
    KeptEntries,
    LengthOf,
    fields_of,
    is_container,
    is_record,
)
from phonograph.graphs.recording.evaluation import (
    UNKNOWN,
    Argument,
    Callee,
    Scene,
    call_of,
    callee_of,
    is_key,
    key_of,
    keys_of,
    unwrapped,
    value_of,
)
from phonograph.graphs.recording.fact import AllItems, Computed, InDict, InList, Source, shown
from phonograph.graphs.recording.lookup import instance_dict
from phonograph.graphs.recording.places import PLAIN


class Use(NamedTuple):
    """Something that a body reads."""

    name: str
    source: Source
    """Where it lies."""
    inside: Source | None = None
    """A container that holds it, whose contents tell it too, unless that is a temporary."""


_MAX_ENTRIES = 128
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType)
_MAPPINGS = (dict, os._Environ, UserDict, ChainMap, types.MappingProxyType, WeakKeyDictionary, WeakValueDictionary)
_LOOKS_UP = ("get", "setdefault", "__getitem__")
_STORES = ("append", "appendleft", "add", "insert", "setdefault", "__setitem__")
_WRITES = (*_STORES, "update", "clear", "extend", "remove", "discard", "pop", "popleft")
"""Methods of containers that don't tell what these hold; the first keep their arguments as they are."""
_NO_READS = (isinstance, issubclass, type, id, callable, print, getattr, hasattr, setattr, vars, super, hash, delattr)
_HANDS_ON = (list, tuple, dict, iter, next, zip, enumerate, reversed, map, filter)
_QUIET = ("logging", "warnings", "contextlib", "threading", "typing", "dataclasses.field")
"""Modules whose functions don't compute anything of their arguments."""
_TENSOR_WALKS = (
    *("parameters", "named_parameters", "get_parameter", "state_dict"),
    *("buffers", "named_buffers", "get_buffer"),
)
_MODULE_WALKS = ("modules", "named_modules", "children", "named_children", "get_submodule", "apply")
"""Methods of every `nn.Module` that go over what it holds."""


def uses_of(read: Read, scene: Scene, looks_into: Any) -> Iterator[Use]:
    """What an instruction reads of the containers that it is given."""
    if read.kind == "call":
        yield from _of_call(read, scene, looks_into)
    elif read.kind in ("whole", "items"):
        for part in read.parts or (read.base,):
            yield from _operand(part, scene)
    elif read.base is not None:
        base, name = value_of(read.base, scene), str(read.base)
        if read.kind == "truth" and is_container(base):
            yield Use(f"the truth of {name}", IsTrue(base))
        elif read.kind == "length":
            yield from _length(name, base, is_in_passing=False)
        elif read.kind == "contains":
            yield from _membership(name, base, value_of(read.parts[0], scene))
        elif read.kind == "match keys":
            keys = value_of(read.parts[0], scene)
            for key in keys if isinstance(keys, tuple) else (UNKNOWN,):
                yield from _item(name, base, key if is_key(key) else UNKNOWN)
        elif read.kind == "item":
            yield from _item(name, base, key_of(read, scene))
            if isinstance(base, torch.Tensor):
                yield from contents_of(str(read.parts[0]) if read.parts else name, _key_value(read, scene))


def _key_value(read: Read, scene: Scene) -> Any:
    return value_of(read.parts[0], scene) if read.parts else read.key


def _operand(read: Read | None, scene: Scene) -> Iterator[Use]:
    is_in_passing = scene.is_in_passing(read)
    yield from contents_of(str(read), value_of(read, scene), is_in_passing=is_in_passing)


def _of_call(read: Read, scene: Scene, looks_into: Any) -> Iterator[Use]:
    if isinstance(held := callee_of(read, scene).function, functools.partial):
        yield from contents_of(f"{read.base}.keywords", held.keywords)
        yield Use(f"{read.base}.args", AllContents.of(held.args))
    if read.key == UNPACKED:
        for part in read.parts:
            yield from _operand(part, scene)
    callee, arguments = call_of(read, scene)
    name = str(read.base.base) if read.base is not None and read.base.base is not None else str(read.base)
    owner = callee.owner
    if isinstance(owner, ContextVar) and callee.name == "get":
        yield Use(f"the context variable {owner.name}", InContext(owner))
    elif callee.name in _LOOKS_UP and arguments and isinstance(owner, _MAPPINGS):
        yield from _item(name, owner, arguments[0].value if is_key(arguments[0].value) else UNKNOWN)
    elif isinstance(owner, torch.nn.Module):
        yield from _walk(owner, callee)
    elif not is_container(unwrapped(owner)) and not isinstance(owner, ChainMap):
        yield from _of_function(read, callee, arguments, scene, looks_into)
    else:
        if callee.name not in _WRITES:
            yield from contents_of(name, owner, is_in_passing=callee.is_in_passing)
        if callee.name not in _STORES and _is_closed(callee, looks_into):
            yield from _passed(arguments)


def _of_function(
    read: Read, callee: Callee, arguments: Sequence[Argument], scene: Scene, looks_into: Any
) -> Iterator[Use]:
    function = callee.function
    if any(function is one for one in modes.QUESTIONS) and not arguments:
        yield Use(f"{read.base}()", Computed(f"{read.base}()", function))
    elif _is_getenv(function) and arguments:
        yield from _item("environ", function.__globals__["environ"], arguments[0].value)
    elif function is len and arguments:
        yield from _length(arguments[0].name, arguments[0].value, is_in_passing=arguments[0].is_in_passing)
    elif type(function) is operator.itemgetter and len(arguments) == 1:
        for key in keys_of(function):
            yield from _item(arguments[0].name, arguments[0].value, key if is_key(key) else UNKNOWN)
    elif _is_closed(callee, looks_into) or (function is UNKNOWN and _is_made_by_closed(read, scene, looks_into)):
        yield from _passed(arguments)
        if function is dir or getattr(function, "__module__", None) == "copy":
            for one in arguments:
                yield from contents_of(one.name, instance_dict(one.value))
        if isinstance(function, types.FunctionType):  # what `functools.singledispatch` chooses from
            yield from contents_of(f"{read.base}.registry", function.__dict__.get("registry"))


def _length(name: str, value: Any, *, is_in_passing: bool) -> Iterator[Use]:
    if isinstance(value, ChainMap):
        yield from contents_of(name, value)
    elif is_container(value := unwrapped(value)) and not is_in_passing:
        yield Use(f"len({name})", LengthOf(value))


def _passed(arguments: Sequence[Argument]) -> Iterator[Use]:
    """All that closed code may read of arguments: of containers, and of methods of them (`map(table.get, names)`)."""
    for one in arguments:
        yield from contents_of(one.name, one.value, is_in_passing=one.is_in_passing)
        method = one.method
        if method is not None and is_container(unwrapped(method.owner)) and method.name not in _WRITES:
            yield from contents_of(one.name, method.owner)


def _walk(module: torch.nn.Module, callee: Callee) -> Iterator[Use]:
    """The tensors and modules that a method of torch's finds below a module."""
    is_torchs = getattr(callee.function, "__module__", None) == torch.nn.Module.__module__
    if not is_torchs or callee.name not in (*_TENSOR_WALKS, *_MODULE_WALKS):
        return
    for path, below in module.named_modules(prefix=type(module).__name__):
        kinds = (below._modules, below._parameters, below._buffers)
        for held in kinds if callee.name in _TENSOR_WALKS else kinds[:1]:
            if isinstance(held, dict):  # of scripted modules they lie in C++
                yield Use(path, AllItems(held))


def _is_getenv(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and (function.__module__, function.__name__) == ("os", "getenv")


def contents_of(name: str, value: Any, *, is_in_passing: bool = False) -> Iterator[Use]:
    """All that a container holds; and of what may be a temporary, all that the containers in it hold."""
    if isinstance(value, PLAIN):
        return
    if isinstance(value, ChainMap):
        yield Use(f"{name}.maps", AllItems(value.maps))
        for one in value.maps:
            yield from contents_of(name, one)
    value = unwrapped(value)
    whole: Source | None = None
    if is_container(value) or is_record(value):
        whole = None if is_in_passing else _whole(value)
        if whole is not None:
            yield Use(f"{name}[…]", whole)
        if not isinstance(whole, AllContents) and not is_in_passing:
            return
    for at, one in enumerate(_containers_in(value)):
        yield Use(f"{name}[…][{at}]", _whole(one), whole)


def _whole(value: Any) -> Source:
    """What a container holds; where that holds nothing in turn, one level is cheaper to look at."""
    if type(value) is not list and not isinstance(value, dict):
        return AllContents.of(value)
    held: Any = value if isinstance(value, list) else dict.values(value)
    is_nested = any(is_container(one) or is_record(one) or isinstance(one, tuple) for one in held)
    return AllContents.of(value) if is_nested else AllItems(value)


def _containers_in(value: Any) -> Iterator[Any]:
    """The outermost containers in tuples, and in the items of a container; not those of hundreds."""
    left, todo = _MAX_ENTRIES, list(items_in(value))
    while todo and left:
        one, left = unwrapped(todo.pop(0)), left - 1
        if is_container(one) or is_record(one):
            yield one
        elif isinstance(one, tuple):
            todo.extend(one)


def items_in(value: Any) -> Iterator[Any]:
    """The first of what a container holds, one level deep."""
    value = unwrapped(value)
    if isinstance(value, tuple | list | set | deque):
        yield from itertools.islice(value, _MAX_ENTRIES)
    elif isinstance(value, dict) or is_record(value):
        held = value if isinstance(value, dict) else fields_of(value)
        yield from itertools.islice(dict.values(held), _MAX_ENTRIES)


def _membership(name: str, base: Any, key: Any) -> Iterator[Use]:
    base, key = unwrapped(base), _kept_as(base, key)
    if isinstance(base, os._Environ | ChainMap):
        yield from _item(name, base, key)
    elif isinstance(base, dict | set) and is_key(key):
        yield Use(f"{shown(key)} in {name}", HasKey(base, key))
    elif isinstance(base, list | set):
        yield from contents_of(name, base)


def _kept_as(base: Any, key: Any) -> Any:
    """What a container has in the place of a key."""
    if not isinstance(base, WeakKeyDictionary) or key is UNKNOWN:
        return key
    try:
        return ref(key)
    except TypeError:
        return UNKNOWN


def _item(name: str, base: Any, key: Any) -> Iterator[Use]:
    """One entry; where the key is not known, all that are there."""
    base, key = unwrapped(base), _kept_as(base, key)
    if isinstance(base, os._Environ):
        if isinstance(key, str):
            yield Use(f"environ[{key!r}]", InDict(getattr(base, "_data", {}), base.encodekey(key)))
    elif isinstance(base, ChainMap):
        yield Use(f"{name}.maps", AllItems(base.maps))
        for one in base.maps:
            yield from _item(name, one, key)
    elif isinstance(base, dict):
        if key is not UNKNOWN:
            yield Use(f"{name}[{shown(key)}]", InDict(base, key))
        elif len(base) <= _MAX_ENTRIES:
            yield Use(f"{name}[…]", KeptEntries(base, tuple(base)))
    elif isinstance(base, list) and isinstance(key, int) and not isinstance(key, bool):
        yield Use(f"{name}[{key!r}]", InList(base, key))
    elif is_container(base) and not isinstance(base, set):
        yield from contents_of(name, base)


def _is_made_by_closed(read: Read, scene: Scene, looks_into: Any) -> bool:
    """Whether what is called comes from a call of closed code: `operator.methodcaller(name)(config)`."""
    made = read.base
    return made is not None and made.kind == "call" and _is_closed(callee_of(made, scene), looks_into)


def computes(callee: Callee, looks_into: Any) -> bool:
    """Whether closed code is called that may compute with what functions give it back, and not only hand it on."""
    return _is_closed(callee, looks_into) and not any(callee.function is one for one in _HANDS_ON)


def _is_closed(callee: Callee, looks_into: Any) -> bool:
    """Whether nobody sees what a function reads, and it may compute with that."""
    function: Any = callee.function
    if function is UNKNOWN:
        return isinstance(callee.owner, torch.Tensor | str)
    if any(function is one for one in _NO_READS):
        return False
    if isinstance(function, staticmethod | classmethod | types.MethodType):
        function = function.__func__
    if isinstance(function, functools.partial):
        return _is_closed(Callee(function.func), looks_into)
    if isinstance(function, types.FunctionType):
        return not looks_into(function.__code__.co_filename) and not str(function.__module__).startswith(_QUIET)
    if isinstance(function, type):
        return function.__module__ in ("builtins", "itertools", "operator", "collections", "numpy")
    return isinstance(function, (*_METHODS, operator.methodcaller)) or type(function).__module__.partition(".")[0] in (
        "torch",
        "numpy",
    )
