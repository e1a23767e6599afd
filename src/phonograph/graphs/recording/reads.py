"""Recorded reads: values from outside that a run of a body reads, seen at each instruction that runs."""

from __future__ import annotations

import bisect
import functools
import importlib
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.modules.container import ModuleDict, ModuleList, Sequential

from phonograph.errors import Frame
from phonograph.graphs.recording.bytecode import Read, reads_of
from phonograph.graphs.recording.contents import InThread
from phonograph.graphs.recording.evaluation import (
    UNKNOWN,
    Callee,
    Scene,
    attribute_of,
    call_of,
    callee_of,
    imported_name,
    keys_of,
    value_of,
)
from phonograph.graphs.recording.fact import (
    FUNCTION_PARTS,
    TENSOR_PARTS,
    AllItems,
    ClassOf,
    Computed,
    Fact,
    FactKind,
    InCell,
    InDict,
    InList,
    InSlot,
    OfFunction,
    OfTensor,
    Source,
)
from phonograph.graphs.recording.frame_memory import memory_of
from phonograph.graphs.recording.functions import Functions
from phonograph.graphs.recording.library_objects import library_reads
from phonograph.graphs.recording.lookup import Held, instance_dict, lookup
from phonograph.graphs.recording.ownership import ASK_ONLY, file_of, is_looked_into, is_of_library, is_ours
from phonograph.graphs.recording.places import PLAIN
from phonograph.graphs.recording.tracing import Callbacks, traced
from phonograph.graphs.recording.uses import computes, contents_of, items_in, uses_of
from phonograph.graphs.recording.weight_caches import parametrize_caching

_NOTHING: dict[int, tuple[CodeType, Any]] = {}
CONTAINERS_OF_MODULES = (ModuleList, Sequential, ModuleDict)
_OF_ONE_CLASS = (*PLAIN, torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType)
"""Values whose class can't be exchanged; those of modules are looked at anyway."""
_BY_NAME = ("__getattribute__", "__getattr__")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Reads:
    """The reads of one run. It keeps alive what was read, so that no object of a later run has its identity."""

    def __init__(self, functions: Functions, looks_into: Callable[[str], bool] | None = None) -> None:
        self.facts: dict[tuple[Any, ...], Fact] = {}
        self.modules: dict[int, tuple[torch.nn.Module, Frame]] = {}
        """Modules whose code ran."""
        self.called: dict[int, tuple[types.FunctionType, Frame]] = {}
        """Functions whose code ran."""
        self._functions = functions
        self._looks_into = looks_into if looks_into is not None else is_looked_into
        self._paused = 0
        self._entered: dict[int, CodeType] = {}
        self._methods: dict[tuple[int, int], tuple[CodeType, type]] = {}
        """Methods that ran, by code and class of the owner."""
        self._known: set[int] = set()
        """Identities of the objects that were read: a function that returns one has read it from somewhere."""
        self._inside: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """By identity of a fact that only a container tells, that container's fact."""
        self._in_closed: dict[int, bool] = {}
        """By frame, whether the instruction that it is at calls closed code, which computes with what it is given."""
        self._returned: dict[int, dict[int, tuple[CodeType, Any]]] = {}
        """By frame and offset, what functions returned there."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is read in here, on this thread."""
        with traced(Callbacks(self._enter, self._read, self._leave), self._looks_into):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gaps run at every replay, and read what is there then."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def keep_what_is_in(self, other: Reads) -> None:
        """Forget temporaries of this run: what the other run did not have; and what another fact tells too."""
        kept = {one: fact for one, fact in self.facts.items() if one in other.facts}
        self.facts = {one: fact for one, fact in kept.items() if self._inside.get(one) not in kept}
        self.modules = {one: met for one, met in self.modules.items() if one in other.modules}
        self.called = {one: met for one, met in self.called.items() if one in other.called}

    # -- events -------------------------------------------------------------------------------------------

    def _enter(self, frame: FrameType) -> None:
        """A function is called."""
        if self._paused or _is_our_own(frame):
            return
        code = frame.f_code
        self._returned.pop(id(frame), None)  # another frame may have had its identity
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, torch.nn.Module):
                self._meet(owner, frame)
        memory = memory_of(frame)
        function: Any = memory.function if memory is not None else None
        if function is not None:
            self._functions.learn(function)
            self.called.setdefault(id(function), (function, _line(frame)))
        elif id(code) not in self._entered:
            for function in self._functions.of(frame):
                self.called[id(function)] = function, _line(frame)
        self._entered[id(code)] = code
        self._note_method(frame)

    def _note_method(self, frame: FrameType) -> None:
        """That a class gives this method: operators, `with`, `for` and calls of classes find theirs without a name."""
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0], UNKNOWN) if code.co_argcount else UNKNOWN
        identity, kind = (id(code), id(type(owner))), type(owner)
        if owner is UNKNOWN or (identity in self._methods and not isinstance(owner, type)):
            return
        self._methods[identity] = code, kind
        if isinstance(owner, PLAIN) or is_of_library(owner) or is_ours(owner):
            return
        found = lookup(owner, code.co_name)
        method = found[-1].value if found else None
        if getattr(getattr(method, "__func__", method), "__code__", None) is code:
            self._note_attribute(Read("attribute", code.co_name, Read("local", "self")), owner, frame)

    def _leave(self, frame: FrameType, value: Any) -> None:
        """A function returns, or yields."""
        caller, code = frame.f_back, frame.f_code
        self._in_closed.pop(id(frame), None)
        if not self._paused and caller is not None and self._in_closed.get(id(caller)):
            for use in contents_of(f"{code.co_qualname}()", value):
                self._note(_kind_of(use.source), use.name, use.source, Read("value", None), frame, use.inside)
        if self._paused or caller is None or id(value) not in self._known or code.co_flags & _GENERATORS:
            return
        offsets = [*reads_of(caller.f_code)]
        at = bisect.bisect_right(offsets, caller.f_lasti) - 1
        if at >= 0:
            self._returned.setdefault(id(caller), {})[offsets[at]] = code, value

    def _meet(self, module: torch.nn.Module, frame: FrameType) -> None:
        if id(module) not in self.modules:
            self.modules[id(module)] = module, _line(frame)
            self._note_attribute(Read("attribute", "forward", Read("local", "self")), module, frame)
            if isinstance(module, CONTAINERS_OF_MODULES):
                for child in vars(module).get("_modules", {}).values():  # none while it is being made
                    self._learn(child, frame)

    def _read(self, frame: FrameType, read: Read) -> None:
        """An instruction is about to read."""
        if self._paused or _is_our_own(frame):
            return
        memory = memory_of(frame)
        scene = Scene(frame, self._returned.get(id(frame), _NOTHING), memory)
        self._in_closed[id(frame)] = read.kind == "call" and computes(callee_of(read, scene), self._looks_into)
        if read.kind == "global":
            self._note_global(read, frame)
        elif read.kind == "cell":
            for cell in self._functions.cells(frame, read.key) if memory is None else memory.cells(read.key):
                self._note("closure", read.key, InCell(cell), read, frame)
        elif read.kind == "attribute":
            is_in_passing = scene.is_in_passing(read.base)
            self._note_inside(read, value_of(read.base, scene), read.key, frame, is_in_passing=is_in_passing)
        elif read.kind == "items" and isinstance(value_of(read.base, scene), list):
            if not scene.is_in_passing(read.base):
                self._note("items", f"{read.base}[…]", AllItems(value_of(read.base, scene)), read, frame)
        elif read.kind == "match class":
            self._note_pattern(read, scene)
        elif read.kind == "import":
            self._note_import(read, imported_name(read, frame), frame)
        else:
            if read.kind == "call":
                self._note_call(read, scene)
            for use in uses_of(read, scene, self._looks_into):
                self._note(_kind_of(use.source), use.name, use.source, read, frame, use.inside)

    def _note_global(self, read: Read, frame: FrameType) -> None:
        """A name that is not there may come, and hide a builtin; which may be replaced."""
        if frame.f_locals.get(read.key, UNKNOWN) is UNKNOWN or frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            module = str(frame.f_globals.get("__name__", "")).rpartition(".")[2]
            self._note("global", f"{module}.{read.key}", InDict(frame.f_globals, read.key), read, frame)
            if read.key not in frame.f_globals:
                self._note("global", f"builtins.{read.key}", InDict(frame.f_builtins, read.key), read, frame)

    def _note_import(self, read: Read, name: str, frame: FrameType) -> None:
        """That an import gives the same module. One that is relative to no package has no name."""
        if name:
            self._note("global", f"sys.modules[{name!r}]", InDict(sys.modules, name), read, frame)

    def _note_pattern(self, read: Read, scene: Scene) -> None:
        """`case Kind(one, two=…)` asks for the class of a value, and for attributes: by place, and by name."""
        subject, (kind, names) = value_of(read.base, scene), (value_of(part, scene) for part in read.parts)
        if subject is UNKNOWN or not isinstance(kind, type) or not isinstance(names, tuple):
            return
        self._note_class(subject, read, scene.frame)
        if not isinstance(subject, kind):
            return
        by_place = attribute_of(kind, "__match_args__") if read.key else ()
        if read.key:
            self._note_inside(Read("attribute", "__match_args__", read.parts[0]), kind, "__match_args__", scene.frame)
        for name in (*(by_place if isinstance(by_place, tuple) else ())[: read.key], *names):
            self._note_inside(Read("attribute", name, read.base), subject, name, scene.frame)

    def _note_class(self, owner: Any, read: Read, frame: FrameType) -> None:
        """That an object is still of its class, where that can be exchanged."""
        if instance_dict(owner) is not None and not isinstance(owner, _OF_ONE_CLASS) and not is_ours(owner):
            self._note("class", f"the class of {_called(owner)}", ClassOf(owner), read, frame)

    def _note_call(self, read: Read, scene: Scene) -> None:
        callee, arguments = call_of(read, scene)
        values = [one.value for one in arguments]
        passed = [] if any(callee.function is one for one in ASK_ONLY) else values
        for module in (callee.function, *passed):
            if isinstance(module, torch.nn.Module):
                self._meet(module, scene.frame)  # its `forward` may be a function that no frame tells of
        self._note_called(callee.function, scene.frame)
        if any(callee.function is one for one in (isinstance, type)) and values and values[0] is not UNKNOWN:
            self._note_class(values[0], read, scene.frame)
        self._note_by_name(read, callee, values, scene.frame)

    def _note_called(self, function: Any, frame: FrameType) -> None:
        """Functions of one code may have defaults of their own."""
        if isinstance(function, types.FunctionType) and self._looks_into(function.__code__.co_filename):
            self.called.setdefault(id(function), (function, _line(frame)))

    def _note_by_name(self, read: Read, callee: Callee, values: Sequence[Any], frame: FrameType) -> None:
        """`getattr(x, name)`, `hasattr(x, name)` and `x.__getattribute__(name)` read as `x.name` does."""
        first = read.parts[0] if read.parts else read
        if type(callee.function) is operator.attrgetter:
            for owner in values[:1]:
                self._note_paths(first, owner, keys_of(callee.function), frame)
            return
        if callee.function is importlib.import_module and values and isinstance(values[0], str):
            self._note_import(read, values[0] if not values[0].startswith(".") else "", frame)
            return
        if callee.function is functools.reduce and values[:1] == [getattr] and len(values) > 2:
            names = [one for one in items_in(values[1]) if isinstance(one, str)]
            self._note_paths(first, values[2], [".".join(names)], frame)
            return
        for getter in (one for one in values if type(one) is operator.attrgetter):
            for owner in (held for one in values for held in items_in(one)):
                self._note_paths(first, owner, keys_of(getter), frame)
        owner, name = [*values, UNKNOWN, UNKNOWN][:2]
        if callee.owner is not UNKNOWN and callee.name in _BY_NAME:
            name = owner
            owner = getattr(callee.owner, "__self__") if isinstance(callee.owner, super) else callee.owner  # noqa: B009
        elif not any(callee.function is one for one in (getattr, hasattr, object.__getattribute__)):
            return
        if isinstance(name, str):
            self._note_inside(Read("attribute", name, first), owner, name, frame)

    def _note_paths(self, read: Read, value: Any, paths: Sequence[str], frame: FrameType) -> None:
        """`operator.attrgetter("a.b")(x)` reads as `x.a.b` does."""
        for path in paths:
            base, owner = read, value
            for name in path.split("."):
                base = Read("attribute", name, base)
                self._note_inside(base, owner, name, frame)
                owner = attribute_of(owner, name) if owner is not UNKNOWN else UNKNOWN

    def _note_inside(self, read: Read, owner: Any, name: str, frame: FrameType, *, is_in_passing: bool = False) -> None:
        if isinstance(owner, types.MethodType) and not hasattr(types.MethodType, name):
            owner, is_in_passing = owner.__func__, False
        if isinstance(owner, threading.local):
            self._note("attribute", f"local.{name}", InThread(owner, name), read, frame)
        elif type(owner) in (torch.Tensor, torch.nn.Parameter) and name in TENSOR_PARTS:
            self._note("attribute", f"{read.base}.{name}", OfTensor(owner, name), read, frame)
        elif isinstance(owner, types.CellType) and name == "cell_contents":
            self._note("closure", str(read), InCell(owner), read, frame)
        elif isinstance(owner, types.FunctionType) and name in FUNCTION_PARTS:
            self._note("default", f"{owner.__qualname__}.{name}", OfFunction(owner, name), read, frame)
        elif is_of_library(owner):
            for told, source in library_reads(owner, name):
                self._note("attribute", f"{read.base}.{told}", source, read, frame)
        elif owner is not UNKNOWN and not is_ours(owner):
            self._note_attribute(read, owner, frame, is_in_passing=is_in_passing)
            if isinstance(owner, dict) and dict.__contains__(owner, name):
                self._note("item", f"{read.base}[{name!r}]", InDict(owner, name), read, frame)

    def _note_attribute(self, read: Read, owner: Any, frame: FrameType, *, is_in_passing: bool = False) -> None:
        found = lookup(owner, read.key)
        base, own = _called(owner), instance_dict(owner) if is_in_passing else None
        for held in found:
            source = _source(held)
            if source is not None and not (is_in_passing and (held.is_slot or held.holder is own)):
                kind: FactKind = "global" if isinstance(owner, types.ModuleType) else "attribute"
                self._note(kind, f"{base}.{read.key}", source, read, frame)
        if found:
            self._note_getter(read, owner, found[-1].value, frame)
            self._learn(found[-1].value, frame)
            if _is_of_class(owner, found[-1]) and isinstance(found[-1].value, types.FunctionType):
                self._note("class", f"the class of {base}", ClassOf(owner), read, frame)

    def _note_getter(self, read: Read, owner: Any, value: Any, frame: FrameType) -> None:
        """What a property reads whose getter is no code that is looked into."""
        getter = value.fget if isinstance(value, property) else None
        if type(getter) is operator.attrgetter:
            self._note_paths(read, owner, keys_of(getter), frame)
        elif (caching := parametrize_caching(getter)) is not None:
            self._note("global", "parametrize._cache_enabled", caching, read, frame)

    def _note(
        self, kind: FactKind, name: str, source: Source, read: Read, frame: FrameType, inside: Source | None = None
    ) -> None:
        identity = source.identity
        if inside is None:
            self._inside.pop(identity, None)
        elif identity not in self.facts:
            self._inside[identity] = inside.identity
        if identity not in self.facts:
            value = source.get()
            self.facts[identity] = Fact(kind, name, source, value, str(read), _line(frame))
            if not isinstance(value, (*PLAIN, torch.Tensor)):
                self._known.add(id(value))
            self._learn(value, frame)

    def _learn(self, value: Any, frame: FrameType) -> None:
        self._functions.learn(value)
        if isinstance(value, torch.nn.Module) and not is_looked_into(file_of(type(value))):
            # Compiled and scripted modules: nobody sees what their code reads.
            for module in value.modules():
                self._meet(module, frame)
                if not is_looked_into(file_of(type(module))):
                    self._note_held(module, frame)

    def _note_held(self, module: torch.nn.Module, frame: FrameType) -> None:
        """Plain values, packed weights and modules that a module of closed code holds."""
        name, read = type(module).__name__, Read("local", "self")
        for key, held in list(vars(module).items()):
            if isinstance(held, (*PLAIN, torch.ScriptObject)):
                self._note("attribute", f"{name}.{key}", InDict(vars(module), key), read, frame)
        if isinstance(module._modules, dict):  # of scripted modules they lie in C++
            self._note("items", name, AllItems(module._modules), read, frame)


def _kind_of(source: Source) -> FactKind:
    if isinstance(source, Computed):
        return "mode"
    return "item" if isinstance(source, InDict | InList) else "items"


def _source(held: Held) -> Source | None:
    if held.holder is None:
        return None
    return InSlot(held.holder, held.key) if held.is_slot else InDict(held.holder, held.key)


def _is_of_class(owner: Any, held: Held) -> bool:
    """Whether another class of an object would give it another attribute; classes of modules are looked at anyway."""
    if isinstance(owner, types.ModuleType | type | super | torch.nn.Module | torch.Tensor) or held.is_slot:
        return False
    return held.holder is not None and held.holder is not instance_dict(owner)


def _called(owner: Any) -> str:
    """What an owner of attributes is called."""
    if isinstance(owner, types.ModuleType | type):
        return owner.__name__
    return owner.__qualname__ if isinstance(owner, types.FunctionType) else type(owner).__name__


def _is_our_own(frame: FrameType) -> bool:
    """Whether code is what a dataclass of the graph layer was given."""
    is_generated = frame.f_code.co_filename == "<string>"
    return is_generated and str(frame.f_globals.get("__name__")).startswith(
        ("phonograph.graphs.", "phonograph.devices")
    )


def _line(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
