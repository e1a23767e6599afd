"""Evaluation: what a read finds in a frame, without running anybody's code."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from phonograph.graphs.recording.bytecode import Read
from phonograph.graphs.recording.lookup import Held, instance_dict, lookup
from phonograph.graphs.recording.places import ABSENT, PLAIN

UNKNOWN: Any = object()
_TENSORS = (torch.Tensor, torch.nn.Parameter)
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
_PURE = (str, int, float, bool, min, max, abs, round)
"""Builtins that give for plain values what they would give in the body."""
_LONG = 10_000


@dataclass(frozen=True)
class Callee:
    """What is called: a function, or the attribute of an owner."""

    function: Any
    owner: Any = UNKNOWN
    name: str = ""


def value_of(read: Read | None, frame: FrameType) -> Any:
    """What a read finds, or `UNKNOWN`."""
    if read is None:
        return UNKNOWN
    if read.kind in ("local", "cell"):
        return frame.f_locals.get(read.key, UNKNOWN)
    if read.kind == "global":
        return frame.f_globals.get(read.key, frame.f_builtins.get(read.key, UNKNOWN))
    if read.kind == "constant":
        return read.key
    if read.kind == "computed":
        return _computed(read, frame)
    if read.kind == "call":
        return _called(read, frame)
    base = value_of(read.base, frame)
    if base is UNKNOWN or read.kind not in ("attribute", "item"):
        return UNKNOWN
    return attribute_of(base, read.key) if read.kind == "attribute" else item_of(base, key_of(read, frame))


def key_of(read: Read, frame: FrameType) -> Any:
    """The key of an item: a constant, or what the frame has for it."""
    found = value_of(read.parts[0], frame) if read.parts else read.key
    return found if found is UNKNOWN or is_key(found) else UNKNOWN


def is_key(value: Any) -> bool:
    """Whether a dict can be asked for a value without running code of its own."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_key, value)))


def attribute_of(base: Any, name: str) -> Any:
    if name == "__dict__":
        held = instance_dict(base)
        return UNKNOWN if held is None else held
    if type(base) in _TENSORS and name in _OF_TENSORS:
        return getattr(base, name) if not torch._C._len_torch_function_stack() else UNKNOWN
    return plain_value(lookup(base, name))


def item_of(base: Any, key: Any) -> Any:
    if key is UNKNOWN:
        return UNKNOWN
    try:
        if isinstance(base, dict):
            return dict.get(base, key, UNKNOWN)
        return base[key] if type(base) in (list, tuple, torch.Size) else UNKNOWN
    except (IndexError, TypeError):
        return UNKNOWN


def plain_value(found: list[Held]) -> Any:
    """The value of an attribute, unless a descriptor makes it."""
    if not found or found[-1].value is ABSENT:
        return UNKNOWN
    value = found[-1].value
    is_method = not found[-1].is_slot and hasattr(type(value), "__get__") and not isinstance(value, type)
    return UNKNOWN if is_method and len(found) > 1 else value


def callee_of(read: Read | None, frame: FrameType) -> Callee:
    """What a call calls. A method is told by its owner and name."""
    if read is None or read.kind != "attribute":
        return Callee(value_of(read, frame))
    owner = value_of(read.base, frame)
    found = lookup(owner, read.key) if owner is not UNKNOWN else []
    return Callee(found[-1].value if found else UNKNOWN, owner, read.key)


def _computed(read: Read, frame: FrameType) -> Any:
    operation = _OPERATIONS.get(read.key)
    parts = [value_of(part, frame) for part in read.parts]
    if operation is None or not all(map(is_key, parts)):
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


def _called(read: Read, frame: FrameType) -> Any:
    """What a call gives, of functions that only look something up."""
    callee, arguments = callee_of(read.base, frame), [value_of(part, frame) for part in read.parts]
    function, owner = callee.function, callee.owner
    if function is globals and not arguments:
        return frame.f_globals
    if function is vars and len(arguments) == 1 and arguments[0] is not UNKNOWN:
        owned = arguments[0]
        return vars(owned) if isinstance(owned, types.ModuleType) else attribute_of(owned, "__dict__")
    if function is getattr and len(arguments) >= 2 and isinstance(arguments[1], str) and arguments[0] is not UNKNOWN:
        return _or_default(attribute_of(arguments[0], arguments[1]), lookup(arguments[0], arguments[1]), arguments[2:])
    if isinstance(owner, dict) and callee.name == "get" and arguments and is_key(arguments[0]):
        return dict.get(owner, arguments[0], arguments[1] if len(arguments) > 1 else None)
    if type(owner) in _TENSORS and callee.name in ("size", "dim") and all(map(is_key, arguments)):
        return owner.size(*arguments) if callee.name == "size" else owner.dim()
    if function is len and len(arguments) == 1 and type(arguments[0]) in (list, dict, set, tuple, str):
        return len(arguments[0])
    is_pure = any(function is one for one in _PURE)
    return _applied(function, arguments) if is_pure and all(map(is_key, arguments)) else UNKNOWN


def _or_default(found: Any, held: list[Held], default: list[Any]) -> Any:
    is_absent = all(one.value is ABSENT for one in held)
    return default[0] if found is UNKNOWN and is_absent and default else found
