"""Evaluation: what a read finds in a frame, without running anybody's code.

Operands of the instruction that is about to run lie on the stack. Where that can't be read, on a Python whose frames
are not known, the expressions that they come from are followed, as far as these go.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import importlib.util
import operator
import sys
import types
import weakref
from collections import UserDict, UserList, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from phonograph.graphs.recording.bytecode import NULL_COMES_LAST, UNPACKED, Read
from phonograph.graphs.recording.fact import OfTensor
from phonograph.graphs.recording.frame_memory import EMPTY, FrameMemory, is_in_passing
from phonograph.graphs.recording.lookup import Held, instance_dict, lookup
from phonograph.graphs.recording.places import ABSENT, PLAIN

UNKNOWN: Any = object()
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_FIELD = type(namedtuple("_Pair", "one").one)  # type: ignore[attr-defined]
_OF_TENSORS = ("shape", "dtype", "device", "ndim")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "/": operator.truediv,
    "%": operator.mod,
    "FORMAT_SIMPLE": format,
    "str": str,
    "repr": repr,
    "BUILD_STRING": lambda *parts: "".join(parts),
    "BUILD_TUPLE": lambda *parts: parts,
}
_PURE = (str, int, float, bool, min, max, abs, round, operator.itemgetter, operator.attrgetter, operator.methodcaller)
"""Functions that give for plain values what they would give in the body."""
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_OVER_DATA = (UserDict, UserList, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_BY_IDENTITY: Any = object
_FINDERS = (weakref.ref, operator.itemgetter, operator.attrgetter)
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType, types.MethodType)
_LONG = 10_000


@dataclass(frozen=True, slots=True)
class Scene:
    """A frame at one of its instructions, and what functions returned to it."""

    frame: FrameType
    returned: Mapping[int, tuple[CodeType, Any]]
    """By offset of the instruction that called: the code that ran, and what it returned."""
    memory: FrameMemory | None = None

    def is_in_passing(self, read: Read | None) -> bool:
        """Whether a value was made for this instruction alone, so that nobody can change it. Ask before it is taken."""
        return self.memory is not None and read is not None and read.at >= 0 and is_in_passing(self.memory, read.at)


@dataclass(frozen=True)
class Callee:
    """What is called: a function, or the attribute of an owner."""

    function: Any
    owner: Any = UNKNOWN
    name: str = ""
    is_in_passing: bool = False
    """Whether the owner was made for this call alone."""


@dataclass(frozen=True, slots=True)
class Argument:
    """What a call passes: how the body calls it, and its value."""

    name: str
    value: Any
    is_in_passing: bool = False
    method: Callee | None = None
    """Its owner, where it is a method."""


def value_of(read: Read | None, scene: Scene) -> Any:
    """What a read finds, or `UNKNOWN`."""
    if read is None:
        return UNKNOWN
    if scene.memory is not None and read.at >= 0:
        found = scene.memory.on_stack(read.at)
        found = UNKNOWN if found is EMPTY else found
    else:
        found = _found(read, scene)
    if type(found) in weakref.ProxyTypes:
        try:
            return found.__init__.__self__  # a method of what it stands for
        except (ReferenceError, AttributeError):
            return UNKNOWN
    return found


def _found(read: Read, scene: Scene) -> Any:
    frame = scene.frame
    if read.kind in ("local", "cell"):
        return frame.f_locals.get(read.key, UNKNOWN)
    if read.kind == "global":
        return frame.f_globals.get(read.key, frame.f_builtins.get(read.key, UNKNOWN))
    if read.kind == "constant":
        return read.key
    if read.kind == "import":
        return sys.modules.get(imported_name(read, frame), UNKNOWN)
    if read.kind in ("computed", "call"):
        is_unknown = read.key == UNPACKED and read.kind == "call"
        return UNKNOWN if is_unknown else _computed(read, scene) if read.kind == "computed" else _called(read, scene)
    if read.kind == "super":
        called, *arguments = (value_of(part, scene) for part in read.parts)
        return _parent(arguments, frame) if called is super else UNKNOWN
    return _inside(read, scene)


def imported_name(read: Read, frame: FrameType) -> str:
    """The full name of the module that an import gives: of `import a.b` it is `a`. Nothing where it has none."""
    name, level, is_from = read.key
    package = str(frame.f_globals.get("__package__") or "")
    try:
        found = importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return ""
    return found if is_from else found.partition(".")[0]


def _inside(read: Read, scene: Scene) -> Any:
    """An attribute or an item of what another read finds."""
    base = value_of(read.base, scene)
    if base is UNKNOWN or read.kind not in ("attribute", "item"):
        return UNKNOWN
    is_attribute = read.kind == "attribute"
    found = attribute_of(base, read.key) if is_attribute else item_of(base, key_of(read, scene))
    if found is UNKNOWN and read.offset in scene.returned:
        by = lookup(base, read.key if is_attribute else "__getitem__")
        return _returned(read, by[-1].value if by else UNKNOWN, scene)
    return found


def _returned(read: Read, function: Any, scene: Scene) -> Any:
    """What this function returned to the read's instruction, if it is known."""
    code, value = scene.returned.get(read.offset, (None, UNKNOWN))
    for name in ("__func__", "fget", "func"):  # methods, properties, partials
        function = getattr(function, name, function) if not isinstance(function, torch.nn.Module) else function
    return value if code is not None and getattr(function, "__code__", None) is code else UNKNOWN


def key_of(read: Read, scene: Scene) -> Any:
    """The key of an item: a constant, or what the frame has for it."""
    found = value_of(read.parts[0], scene) if read.parts else read.key
    return found if found is UNKNOWN or is_key(found) else UNKNOWN


def is_key(value: Any) -> bool:
    """Whether a dict can be asked for a value without running code of its own."""
    if isinstance(value, (*PLAIN, enum.Enum)) or (type(value) is tuple and all(map(is_key, value))):
        return True
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType | None)
    kind: Any = type(value)
    return kind.__hash__ is _BY_IDENTITY.__hash__ and kind.__eq__ is _BY_IDENTITY.__eq__


def is_plain(value: Any) -> bool:
    """Whether a value can be computed with, without running code of its own."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def attribute_of(base: Any, name: str) -> Any:
    if name == "__dict__":
        held = instance_dict(base)
        return UNKNOWN if held is None else held
    if type(base) in _TENSORS and name in _OF_TENSORS:
        return getattr(base, name) if not torch._C._len_torch_function_stack() else UNKNOWN
    if type(base) in _TENSORS and name == "grad":
        return OfTensor(base, name).get()
    if name == "__class__":
        return type(base)
    if isinstance(base, tuple) and isinstance(getter := getattr(type(base), name, None), _FIELD):
        return item_of(base, getter.__reduce__()[1][0])
    found = plain_value(lookup(base, name))
    # A dict whose attributes are its keys.
    return dict.get(base, name, UNKNOWN) if found is UNKNOWN and isinstance(base, dict) else found


def unwrapped(value: Any) -> Any:
    """What a container of the standard library keeps its items in."""
    if isinstance(value, _OVER_DATA):
        return vars(value)["data"]
    if isinstance(value, memoryview):
        return value.obj
    if isinstance(value, (types.MappingProxyType, *_VIEWS)):
        return next((one for one in gc.get_referents(value) if isinstance(one, dict)), value)
    return value


def item_of(base: Any, key: Any) -> Any:
    if key is UNKNOWN:
        return UNKNOWN
    base = unwrapped(base)
    try:
        if isinstance(base, dict):
            return dict.get(base, key, UNKNOWN)
        if isinstance(base, enum.EnumMeta):
            return vars(base)["_member_map_"].get(key, UNKNOWN)
        is_tuple = isinstance(base, tuple) and type(base).__getitem__ is tuple.__getitem__  # also one with names
        is_of_objects = type(base) is np.ndarray and base.dtype.hasobject
        return base[key] if is_tuple or is_of_objects or type(base) in (list, torch.Size) else UNKNOWN
    except (IndexError, TypeError, ValueError):
        return UNKNOWN


def plain_value(found: list[Held]) -> Any:
    """The value of an attribute, unless a descriptor makes it."""
    if not found or found[-1].value is ABSENT:
        return UNKNOWN
    value = found[-1].value
    is_method = not found[-1].is_slot and hasattr(type(value), "__get__") and not isinstance(value, type)
    return UNKNOWN if isinstance(value, property) or (is_method and len(found) > 1) else value


def call_of(read: Read, scene: Scene) -> tuple[Callee, list[Argument]]:
    """What a call calls, and with what; of a partial, what that calls."""
    callee, arguments = callee_of(read, scene), list(_passed(read, scene))
    function = callee.function
    if not isinstance(function, functools.partial):
        return callee, arguments
    held = [*function.args, *(value for key, value in function.keywords.items())]
    before = [Argument(f"{read.base}.args[{at}]", value) for at, value in enumerate(held)]
    return method_of(function.func) or Callee(function.func), [*before, *arguments]


def _passed(read: Read, scene: Scene) -> Iterator[Argument]:
    for part in read.parts:
        is_in_passing = scene.is_in_passing(part)
        value = value_of(part, scene)
        if read.key != UNPACKED:
            method = method_at(part, scene) if value is UNKNOWN else method_of(value)
            yield Argument(str(part), value, is_in_passing, method)
        elif type(value) in (tuple, list, dict):
            for one in value.values() if type(value) is dict else value:
                yield Argument(f"{part}[…]", one, method=method_of(one))


def callee_of(read: Read, scene: Scene) -> Callee:
    """What a call calls. A method is told by its owner and name, also one that was kept (`get = table.get`)."""
    base = read.base
    if base is None or base.at < 0 or scene.memory is None:
        return method_at(base, scene)
    is_made = is_in_passing(scene.memory, base.at + 1)
    lower, upper = scene.memory.on_stack(base.at), scene.memory.on_stack(base.at + 1)
    function, owner = (upper, EMPTY) if lower is EMPTY and not NULL_COMES_LAST else (lower, upper)
    if owner is EMPTY:
        return method_of(function) or Callee(function)
    name = base.key if base.kind == "attribute" else getattr(function, "__name__", "")
    return Callee(function, owner, name, is_made)


def method_at(read: Read | None, scene: Scene) -> Callee:
    """What a value calls when it is called."""
    if read is None or read.kind != "attribute" or (read.at >= 0 and scene.memory is not None):
        found = value_of(read, scene)
        return method_of(found) or Callee(found)
    owner = value_of(read.base, scene)
    held = lookup(owner, read.key) if owner is not UNKNOWN else []
    function = held[-1].value if held and held[-1].value is not ABSENT else UNKNOWN
    return method_of(function) or Callee(function, owner, read.key)


def method_of(function: Any) -> Callee | None:
    """A bound method by its owner; None for everything else."""
    owner = getattr(function, "__self__", None) if isinstance(function, _METHODS) else None
    if owner is None or isinstance(owner, types.ModuleType | type):
        return None
    return Callee(function, owner, str(getattr(function, "__name__", "")))


def keys_of(getter: Any) -> tuple[Any, ...]:
    """The keys of an `itemgetter`, the paths of an `attrgetter`."""
    found: tuple[Any, ...] = getter.__reduce__()[1]
    return found


def _got(getter: Any, owner: Any) -> Any:
    """What an `itemgetter` or `attrgetter` gets of an object."""
    found = []
    for key in keys_of(getter):
        value = owner
        if isinstance(getter, operator.itemgetter):
            value = item_of(owner, key if is_key(key) else UNKNOWN)
        else:
            for name in key.split("."):
                value = attribute_of(value, name) if value is not UNKNOWN else UNKNOWN
        found.append(value)
    return UNKNOWN if any(one is UNKNOWN for one in found) else found[0] if len(found) == 1 else tuple(found)


def _computed(read: Read, scene: Scene) -> Any:
    operation = _OPERATIONS.get(read.key)
    parts = [value_of(part, scene) for part in read.parts]
    if operation is None or not all(map(is_plain, parts)):
        return UNKNOWN
    return _applied(operation, parts)


def _applied(function: Callable[..., Any], parts: list[Any]) -> Any:
    """Of short plain values."""
    if any(isinstance(part, str | bytes) and len(part) > _LONG for part in parts):
        return UNKNOWN
    try:
        return function(*parts)
    except Exception:
        return UNKNOWN


def _called(read: Read, scene: Scene) -> Any:
    """What a call gives, of functions that only look something up."""
    callee, arguments = callee_of(read, scene), [value_of(part, scene) for part in read.parts]
    function, owner = callee.function, callee.owner
    if function is super or (function is globals and not arguments):
        return _parent(arguments, scene.frame) if function is super else scene.frame.f_globals
    if any(function is one for one in (vars, type, getattr)) and arguments and arguments[0] is not UNKNOWN:
        return _of_object(function, *arguments)
    if type(function) in _FINDERS or isinstance(function, enum.EnumMeta) or function is importlib.import_module:
        return _elsewhere(function, arguments)
    if isinstance(owner, dict) and callee.name == "get" and arguments and is_key(arguments[0]):
        return dict.get(owner, arguments[0], arguments[1] if len(arguments) > 1 else None)
    if read.offset in scene.returned:
        return _returned(read, function, scene)
    if type(owner) in _TENSORS and callee.name in ("size", "dim") and all(map(is_plain, arguments)):
        return owner.size(*arguments) if callee.name == "size" else owner.dim()
    if function is len and len(arguments) == 1 and type(arguments[0]) in (list, dict, set, tuple, str):
        return len(arguments[0])
    is_pure = any(function is one for one in _PURE)
    return _applied(function, arguments) if is_pure and all(map(is_plain, arguments)) else UNKNOWN


def _elsewhere(function: Any, arguments: list[Any]) -> Any:
    """What a weak reference refers to, a module by its name, what a getter gets, a member of an enum by its value."""
    if type(function) is weakref.ref:
        found = function()
        return UNKNOWN if found is None else found
    if len(arguments) != 1 or arguments[0] is UNKNOWN:
        return UNKNOWN
    if type(function) in _FINDERS:
        return _got(function, arguments[0])
    if isinstance(function, enum.EnumMeta):
        return vars(function)["_value2member_map_"].get(arguments[0], UNKNOWN) if is_plain(arguments[0]) else UNKNOWN
    is_name = isinstance(arguments[0], str) and not arguments[0].startswith(".")
    return sys.modules.get(arguments[0], UNKNOWN) if is_name else UNKNOWN


def _of_object(function: Any, owner: Any, *arguments: Any) -> Any:
    """`vars`, `type` and `getattr` of an object."""
    if function is vars:
        return vars(owner) if isinstance(owner, types.ModuleType) else attribute_of(owner, "__dict__")
    if function is type:
        return UNKNOWN if arguments else type(owner)
    if not arguments or not isinstance(arguments[0], str):
        return UNKNOWN
    return _or_default(attribute_of(owner, arguments[0]), lookup(owner, arguments[0]), list(arguments[1:]))


def _parent(arguments: list[Any], frame: FrameType) -> Any:
    """What `super()` gives in a frame."""
    if not arguments and frame.f_code.co_argcount:
        arguments = [frame.f_locals.get(name, UNKNOWN) for name in ("__class__", frame.f_code.co_varnames[0])]
    is_known = len(arguments) == 2 and isinstance(arguments[0], type) and arguments[1] is not UNKNOWN
    kind = arguments[1] if is_known and isinstance(arguments[1], type) else type(arguments[-1]) if is_known else object
    return super(*arguments) if is_known and issubclass(kind, arguments[0]) else UNKNOWN


def _or_default(found: Any, held: list[Held], default: list[Any]) -> Any:
    is_absent = all(one.value is ABSENT for one in held)
    return default[0] if found is UNKNOWN and is_absent and default else found
