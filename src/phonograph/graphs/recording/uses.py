"""Uses: what a body reads by calls into closed code, by operators, by keys that it computes, and by asking for truth.

Code that is looked into shows its reads itself. Of what is passed to other code (Python's builtins, torch, the standard
library), all that a container holds counts as read.
"""

from __future__ import annotations

import functools
import operator
import os
import types
from collections import ChainMap, UserDict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from phonograph.graphs.recording import modes
from phonograph.graphs.recording.bytecode import Read
from phonograph.graphs.recording.contents import (
    AllContents,
    HasKey,
    InContext,
    IsTrue,
    KeptEntries,
    is_container,
    is_record,
)
from phonograph.graphs.recording.evaluation import (
    UNKNOWN,
    Callee,
    Scene,
    callee_of,
    is_key,
    key_of,
    keys_of,
    method_of,
    unwrapped,
    value_of,
)
from phonograph.graphs.recording.fact import AllItems, Computed, InDict, InList, Source

Use = tuple[str, Source]
"""What it is called, and where it lies."""
_MAX_ENTRIES = 128
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType)
_MAPPINGS = (dict, os._Environ, UserDict, ChainMap, types.MappingProxyType, WeakKeyDictionary)
_LOOKS_UP = ("get", "setdefault", "__getitem__")
_WRITES = ("append", "add", "update", "clear", "extend", "insert", "remove", "discard", "pop", "popleft", "appendleft")
_NO_READS = (isinstance, issubclass, type, id, callable, print, getattr, hasattr, setattr, vars, super, hash, delattr)
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
    elif read.kind == "whole":
        for part in read.parts:
            yield from _whole(str(part), value_of(part, scene))
    elif read.base is not None:
        base, name = value_of(read.base, scene), str(read.base)
        if read.kind == "truth" and is_container(base):
            yield f"the truth of {name}", IsTrue(base)
        elif read.kind == "items":
            yield from _whole(name, base)
        elif read.kind == "contains":
            yield from _membership(name, base, value_of(read.parts[0], scene))
        elif read.kind == "item":
            yield from _item(name, base, key_of(read, scene))


def _of_call(read: Read, scene: Scene, looks_into: Any) -> Iterator[Use]:
    callee, arguments = callee_of(read.base, scene), [value_of(part, scene) for part in read.parts]
    name = str(read.base.base) if read.base is not None and read.base.base is not None else str(read.base)
    if isinstance(callee.function, functools.partial):
        held = callee.function
        yield from _whole(f"{read.base}.keywords", held.keywords)
        yield f"{read.base}.args", AllContents.of(held.args)
        callee, arguments = method_of(held.func) or Callee(held.func), [*held.args, *arguments]
    owner = callee.owner
    if isinstance(owner, ContextVar) and callee.name == "get":
        yield f"the context variable {owner.name}", InContext(owner)
    elif callee.name in _LOOKS_UP and arguments and isinstance(owner, _MAPPINGS):
        yield from _item(name, owner, arguments[0] if is_key(arguments[0]) else UNKNOWN)
    elif isinstance(owner, torch.nn.Module):
        yield from _walk(owner, callee)
    elif not is_container(unwrapped(owner)):
        yield from _of_function(read, callee, arguments, scene, looks_into)
    elif callee.name not in _WRITES:
        yield from _whole(name, owner)


def _of_function(read: Read, callee: Callee, arguments: Sequence[Any], scene: Scene, looks_into: Any) -> Iterator[Use]:
    function = callee.function
    if any(function is one for one in modes.QUESTIONS) and not arguments:
        yield f"{read.base}()", Computed(f"{read.base}()", function)
    elif _is_getenv(function) and arguments:
        yield from _item("environ", function.__globals__["environ"], arguments[0])
    elif type(function) is operator.itemgetter and len(arguments) == 1:
        for key in keys_of(function):
            yield from _item(str(read.parts[0] if read.parts else read), arguments[0], key if is_key(key) else UNKNOWN)
    elif _is_closed(callee, looks_into) or (function is UNKNOWN and _is_made_by_closed(read, scene, looks_into)):
        for part in read.parts:
            yield from _passed(part, value_of(part, scene), scene)


def _passed(part: Read | None, value: Any, scene: Scene) -> Iterator[Use]:
    """All that closed code may read of an argument: a container, or a method of one (`map(table.get, names)`)."""
    if is_container(value) or is_record(value):
        yield from _whole(str(part), value)
    elif value is UNKNOWN or isinstance(value, _METHODS):
        method = callee_of(part, scene)
        if is_container(unwrapped(method.owner)) and method.name not in _WRITES:
            yield from _whole(str(part), method.owner)


def _walk(module: torch.nn.Module, callee: Callee) -> Iterator[Use]:
    """The tensors and modules that a method of torch's finds below a module."""
    is_torchs = getattr(callee.function, "__module__", None) == torch.nn.Module.__module__
    if not is_torchs or callee.name not in (*_TENSOR_WALKS, *_MODULE_WALKS):
        return
    for path, below in module.named_modules(prefix=type(module).__name__):
        kinds = (below._modules, below._parameters, below._buffers)
        for held in kinds if callee.name in _TENSOR_WALKS else kinds[:1]:
            if isinstance(held, dict):  # of scripted modules they lie in C++
                yield path, AllItems(held)


def _is_getenv(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and (function.__module__, function.__name__) == ("os", "getenv")


def _whole(name: str, value: Any) -> Iterator[Use]:
    """All that a container holds; where that holds nothing in turn, one level is cheaper to look at."""
    value = unwrapped(value)
    if type(value) is list or isinstance(value, dict):
        held: Any = value if isinstance(value, list) else dict.values(value)
        is_nested = any(is_container(one) or is_record(one) or isinstance(one, tuple) for one in held)
        yield f"{name}[…]", AllContents.of(value) if is_nested else AllItems(value)
    elif is_container(value) or is_record(value):
        yield f"{name}[…]", AllContents.of(value)


def _membership(name: str, base: Any, key: Any) -> Iterator[Use]:
    base = unwrapped(base)
    if isinstance(base, os._Environ | ChainMap):
        yield from _item(name, base, key)
    elif isinstance(base, dict | set) and is_key(key):
        yield f"{key!r} in {name}", HasKey(base, key)
    elif isinstance(base, list | set):
        yield from _whole(name, base)


def _item(name: str, base: Any, key: Any) -> Iterator[Use]:
    """One entry; where the key is not known, all that are there."""
    base = unwrapped(base)
    if isinstance(base, os._Environ):
        if isinstance(key, str):
            yield f"environ[{key!r}]", InDict(getattr(base, "_data", {}), base.encodekey(key))
    elif isinstance(base, ChainMap):
        for one in base.maps:
            yield from _item(name, one, key)
    elif isinstance(base, dict):
        if key is not UNKNOWN:
            yield f"{name}[{key!r}]", InDict(base, key)
        elif len(base) <= _MAX_ENTRIES:
            yield f"{name}[…]", KeptEntries(base, tuple(base))
    elif isinstance(base, list) and isinstance(key, int) and not isinstance(key, bool):
        yield f"{name}[{key!r}]", InList(base, key)
    elif is_container(base) and not isinstance(base, set):
        yield from _whole(name, base)


def _is_made_by_closed(read: Read, scene: Scene, looks_into: Any) -> bool:
    """Whether what is called comes from a call of closed code: `operator.methodcaller(name)(config)`."""
    made = read.base
    return made is not None and made.kind == "call" and _is_closed(callee_of(made.base, scene), looks_into)


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
