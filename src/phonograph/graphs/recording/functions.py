"""Functions: which function objects a frame may belong to, and so which closure cells its reads go to.

Python's frames don't tell their function. Those that a body can have called are known from the values that it read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from phonograph.graphs.recording.lookup import instance_dict
from phonograph.graphs.recording.places import PLAIN

_KEPT = (types.FunctionType, type, torch.nn.Module)
_SKIPPED = (*PLAIN, torch.Tensor, types.ModuleType, types.BuiltinFunctionType, dict, list, set)


class Functions:
    """The functions that were met, by their code."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}
        self._by_code: dict[int, tuple[CodeType, list[types.FunctionType]]] = {}

    def learn(self, value: Any) -> None:
        """Add a function, or those that a value calls when it is called."""
        todo, met = [value], dict[int, Any]()
        while todo:
            one = todo.pop()
            if isinstance(one, _SKIPPED) or id(one) in self._met or id(one) in met:
                continue
            # Held, so that its identity is not given to another; for good only what is no temporary with device memory.
            (self._met if isinstance(one, _KEPT) else met)[id(one)] = one
            if isinstance(one, types.FunctionType):
                self._by_code.setdefault(id(one.__code__), (one.__code__, []))[1].append(one)
            todo.extend(_parts(one))

    def of(self, frame: FrameType) -> list[types.FunctionType]:
        """The functions that have a frame's code."""
        code = frame.f_code
        if id(code) not in self._by_code:
            self.learn(frame.f_globals.get(code.co_name))
            if code.co_argcount:
                owner = frame.f_locals.get(code.co_varnames[0])
                kind = owner if isinstance(owner, type) else type(owner)
                for one in kind.__mro__:
                    self.learn(vars(one).get(code.co_name))
        return self._by_code.get(id(code), (code, []))[1]

    def cells(self, frame: FrameType, name: str) -> list[types.CellType]:
        """The cells that a free variable of a frame may come from: those that hold its value."""
        free = frame.f_code.co_freevars
        if name not in free:
            return []
        index, value = free.index(name), frame.f_locals.get(name)
        found: dict[int, types.CellType] = {}
        for function in self.of(frame):
            cell = (function.__closure__ or ())[index]
            if _content(cell) is value:
                found[id(cell)] = cell
        return list(found.values())


def _parts(value: Any) -> Iterator[Any]:
    """What a value calls when it is called, as far as it shows."""
    if isinstance(value, types.FunctionType):
        yield from map(_content, value.__closure__ or ())
        yield value.__dict__.get("__wrapped__")
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, functools.partial | functools.cached_property):
        yield value.func
    elif isinstance(value, type):
        yield from (vars(one).get("__init__") for one in value.__mro__)
    else:
        held = instance_dict(value) or {}
        yield from (held.get(name) for name in ("__wrapped__", "inline", "forward"))
        for name in ("forward", "__call__"):
            yield next((vars(one)[name] for one in type(value).__mro__ if name in vars(one)), None)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
