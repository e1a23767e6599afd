"""Rebinding: an object that is replaced by an equal one makes nothing stale; its facts go over to the new one."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from phonograph.graphs.recording.contents import AllContents, HasKey, IsTrue, KeptEntries, LengthOf
from phonograph.graphs.recording.fact import AllItems, ClassOf, Fact, HooksOf, InDict, InList, InSlot, unchanged
from phonograph.graphs.recording.lookup import instance_dict
from phonograph.graphs.recording.places import PLAIN, same

_KEPT = (*PLAIN, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
_MOVABLE = (ClassOf, HooksOf, InDict, InSlot, InList, AllItems, AllContents, KeptEntries, HasKey, IsTrue, LengthOf)
_MAX_ROUNDS = 8


def rebound(facts: Sequence[Fact]) -> list[Fact] | None:
    """The facts with equal objects in the place of those that were replaced; None where one differs truly.

    An object is equal if all that it holds is, down to plain values and the same tensors, and every fact about it
    holds of the new one: what the body read, and what nobody saw it read.
    """
    found = list(facts)
    for _ in range(_MAX_ROUNDS):
        differing = [(at, fact, fact.source.get()) for at, fact in enumerate(found) if fact.differs]
        if not differing:
            return found
        for at, fact, now in differing:
            moved = _moved(fact.value, now)
            if moved is None or _is_held_elsewhere(fact, found):
                return None
            found[at] = replace(fact, value=now)
            found = [_in_place_of(one, moved) for one in found]
    return None


def _is_held_elsewhere(fact: Fact, facts: Sequence[Fact]) -> bool:
    """Whether the body reads the old object in another place too, where it still is."""
    return any(_holds(one.value, fact.value) and not one.differs for one in facts if one is not fact)


def _holds(value: Any, wanted: Any) -> bool:
    return value is wanted or (isinstance(value, tuple) and any(_holds(one, wanted) for one in value))


def _moved(then: Any, now: Any) -> dict[int, Any] | None:
    """By identity of each old object and dict, the new one; None where they are not equal."""
    if isinstance(then, tuple) and isinstance(now, tuple) and len(then) == len(now):
        pairs = [_moved(one, other) for one, other in zip(then, now, strict=True) if not unchanged(one, other)]
        return None if None in pairs else {key: one for pair in pairs if pair for key, one in pair.items()}
    if isinstance(then, torch.nn.Module) and type(then) is type(now):
        return _moved_module(then, now)
    if isinstance(then, _KEPT) or type(then) is not type(now) or not same(then, now):
        return None
    found = {id(then): now}
    held, other = instance_dict(then), instance_dict(now)
    if held is not None and other is not None:
        found[id(held)] = other
    return found


def _moved_module(then: torch.nn.Module, now: torch.nn.Module) -> dict[int, Any] | None:
    """The same of a module that holds the very tensors and modules of another: `copy.copy` makes such."""
    held, other = vars(then), vars(now)
    if held.keys() != other.keys():
        return None
    found = {id(then): now, id(held): other}
    for name, value in held.items():
        if isinstance(value, dict) and type(value) is type(other[name]):
            is_equal = [*value] == [*other[name]] and all(map(unchanged, value.values(), other[name].values()))
            moved: dict[int, Any] | None = {id(value): other[name]} if is_equal else None
        else:
            moved = {} if unchanged(value, other[name]) else _moved(value, other[name])
        if moved is None:
            return None
        found |= moved
    return found


def _in_place_of(fact: Fact, moved: dict[int, Any]) -> Fact:
    """A fact about an old object, asked of the new one; it holds or differs there as before."""
    source = fact.source
    if isinstance(source, _MOVABLE) and id(source.holder) in moved:
        return replace(fact, source=replace(source, holder=moved[id(source.holder)]))
    return fact
