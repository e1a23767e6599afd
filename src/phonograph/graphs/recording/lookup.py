"""Lookup of attributes without running code: where an attribute lies, as Python would find it."""

from __future__ import annotations

import enum
import functools
import gc
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.graphs.recording.places import ABSENT


@dataclass(frozen=True, slots=True)
class Held:
    """A value in a dict or a slot."""

    holder: Any
    key: Any
    value: Any
    is_slot: bool = False


def lookup(owner: Any, name: str) -> list[Held]:
    """Where `owner.name` lies, the value's own place last; before it, places that must stay empty for it to be found.

    Where nothing has the name, all places that would be looked at; none where only running code can tell.
    """
    if isinstance(owner, types.ModuleType):
        return _in(vars(owner), name)
    if isinstance(owner, super):
        return list(_in_classes(_after(owner), name))
    if isinstance(owner, type):
        members = vars(owner)["_member_map_"] if isinstance(owner, enum.EnumMeta) else {}
        return [Held(None, name, members[name])] if name in members else _of_class(owner, name)
    found = list(_in_classes(type(owner).__mro__, name))
    by_class = found[-1].value if found else ABSENT
    if isinstance(by_class, types.MemberDescriptorType):
        return [Held(owner, by_class, _slot_value(owner, by_class), is_slot=True)]
    held = instance_dict(owner)
    if isinstance(owner, enum.Enum) and any(by_class is one for one in _OF_ENUMS):
        name, by_class, found = f"_{name}_", ABSENT, []
    if held is None or (by_class is not ABSENT and hasattr(type(by_class), "__set__")):
        return found  # a property: its own code is what reads
    return _in(held, name) if name in held else _outside(owner, name, held, found)


def _of_class(owner: type, name: str) -> list[Held]:
    """Where a class has an attribute: in the order of its classes, else in its metaclass."""
    found = list(_in_classes(owner.__mro__, name))
    is_there, kind = bool(found) and found[-1].value is not ABSENT, type(owner)
    order: Sequence[type] = type.__getattribute__(kind, "__mro__")
    return found if is_there or kind is type else [*found, *_in_classes(order, name)]


def _outside(owner: Any, name: str, held: dict[str, Any], found: list[Held]) -> list[Held]:
    """Where an attribute lies that the object's own dict does not have: in its classes, in a module's other dicts."""
    if isinstance(owner, torch.Tensor):
        return found
    if found and found[-1].value is not ABSENT:
        return [Held(held, name, ABSENT), *found]
    kinds: list[Any] = []
    if isinstance(owner, torch.nn.Module):
        kinds = [held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")]
        if (has := next((one for one in kinds if name in one), None)) is not None:
            return _in(has, name)
    return [*found, *(Held(one, name, ABSENT) for one in kinds if isinstance(one, dict)), *_in(held, name)]


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_OF_ENUMS = (vars(enum.Enum)["value"], vars(enum.Enum)["name"])


def _after(parent: Any) -> Sequence[type]:
    """The classes that `super()` asks."""
    order: Sequence[type] = parent.__self_class__.__mro__
    return order[order.index(parent.__thisclass__) + 1 :]


def _slot_value(owner: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return ABSENT


def instance_dict(owner: Any) -> dict[str, Any] | None:
    """The attributes of an object, or None where it keeps none."""
    kind = threading.local if isinstance(owner, threading.local) else object
    try:
        held = kind.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return held if isinstance(held, dict) else None


def class_dict(kind: type) -> dict[str, Any] | None:
    """The dict of a class itself; `vars` gives a proxy, which knows no version."""
    found = gc.get_referents(vars(kind))
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else None


def _in(held: dict[Any, Any], key: Any) -> list[Held]:
    return [Held(held, key, dict.get(held, key, ABSENT))]


def _in_classes(order: Sequence[type], name: str) -> Iterator[Held]:
    """The places in the order of classes, up to the first that has the name; all of them where none has it."""
    before: list[Held] = []
    for one in order:
        found = vars(one).get(name, ABSENT)
        held = _watched_dict(one)
        if held is not None:
            before.append(Held(held, name, found))
        if found is not ABSENT:
            if held is None:
                before.append(Held(None, name, found))
            break
    yield from before


@functools.lru_cache(maxsize=4096)
def _watched_dict(kind: type) -> dict[str, Any] | None:
    """Classes of torch but its modules and tensors, and of C extensions, are not watched."""
    if kind in _TENSORS:
        return class_dict(kind)
    module = str(kind.__module__)
    is_torch = module.partition(".")[0] == "torch" and not module.startswith("torch.nn.modules.")
    if is_torch or kind is torch.nn.Module or not kind.__flags__ & (1 << 9):  # a heap type: made by a class statement
        return None
    return class_dict(kind)
