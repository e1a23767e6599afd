"""Frame memory: the values that an instruction is about to take from the stack, and a frame's own function and cells.

Python shows the locals of a frame, but not what lies on its stack: results of calls, and objects made in passing. They
are read from the frame's memory, at places that are found by looking for known values; where one is not found, nothing
is read.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_HEADER = object.__basicsize__
_TAGS = 3
"""Bits of a pointer that Python may use for itself; with all of them it is no pointer."""
_SEARCHED = 16
EMPTY: Any = object()
"""Stands for a place that holds no object."""


@dataclass(frozen=True)
class Layout:
    """Where a frame keeps its function and its first local, in bytes."""

    function: int
    locals: int


class FrameMemory:
    """The memory of a frame that runs. Use it at once, while the frame stands where it stands."""

    __slots__ = ("_address", "_code", "_layout", "_stack")

    def __init__(self, frame: FrameType, layout: Layout) -> None:
        self._layout, self._code = layout, frame.f_code
        self._address = _frame_address(frame)
        self._stack = self._address + layout.locals + _POINTER * _num_fast(frame.f_code)

    def on_stack(self, index: int) -> Any:
        """The value at a depth of the stack, from the bottom."""
        return _object_at(self._stack + _POINTER * index)

    def references(self, index: int) -> int:
        """How many there are to a value of the stack, with those that it takes to tell."""
        found = _object_at(self._stack + _POINTER * index)
        return sys.getrefcount(found)

    def cells(self, name: str) -> list[types.CellType]:
        """The cell of a variable of an outer function."""
        if name not in self._code.co_freevars:
            return []
        free = self._code.co_freevars
        found = _object_at(self._stack + _POINTER * (free.index(name) - len(free)))
        return [found] if isinstance(found, types.CellType) else []

    @property
    def function(self) -> types.FunctionType | None:
        """The function that runs in the frame."""
        found = _object_at(self._address + self._layout.function)
        return found if isinstance(found, types.FunctionType) else None


def memory_of(frame: FrameType) -> FrameMemory | None:
    """None on a Python whose frames are not known."""
    layout = _layout()
    return None if layout is None else FrameMemory(frame, layout)


def are_known() -> bool:
    """Whether the memory of frames can be read on this Python."""
    return _layout() is not None


def is_in_passing(memory: FrameMemory, index: int) -> bool:
    """Whether nothing but the stack has the value at this depth. Such a value is gone after the run."""
    return memory.references(index) <= _references_of_one()


@functools.lru_cache(maxsize=4096)
def _num_fast(code: CodeType) -> int:
    """How many locals and cells a frame has before its stack."""
    own = [name for name in code.co_cellvars if name not in code.co_varnames]
    return code.co_nlocals + len(own) + len(code.co_freevars)


def _word(address: int) -> int:
    """The pointer at an address; 0 where there is none."""
    found = ctypes.c_size_t.from_address(address).value
    return 0 if found & _TAGS == _TAGS else found & ~_TAGS


def _object_at(address: int) -> Any:
    pointer = _word(address)
    return ctypes.cast(pointer, ctypes.py_object).value if pointer else EMPTY


def _frame_address(frame: FrameType) -> int:
    """After its header a frame object has the frame before it, and the memory of its own."""
    return _word(id(frame) + _HEADER + _POINTER)


# -- where things lie, found by looking for known values ------------------------------------------------------------


@functools.cache
def _layout() -> Layout | None:
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info < (3, 14):
        return None
    found = _searched(object(), object(), object())
    return found if found is not None and _is_on_stack(found, object()) else None


def _searched(one: object, two: object, three: object) -> Layout | None:
    """Where this function's frame has its arguments, and the function itself."""
    frame = sys._getframe()
    if not _has_memory(frame):
        return None
    address, wanted = _frame_address(frame), [id(one), id(two), id(three)]
    words = [_word(address + _POINTER * index) for index in range(_SEARCHED)]
    starts = [at for at in range(_SEARCHED - 2) if words[at : at + 3] == wanted]
    functions = [at for at, word in enumerate(words) if word == id(_searched)]
    if len(starts) != 1 or len(functions) != 1:
        return None
    return Layout(_POINTER * functions[0], _POINTER * starts[0])


def _has_memory(frame: FrameType) -> bool:
    """Whether a frame object has its trace function where it is looked for, after the pointer to its memory."""
    trace: Any = [].append
    frame.f_trace = trace
    is_there = _word(id(frame) + _HEADER + 2 * _POINTER) == id(trace)
    frame.f_trace = None
    return is_there


def _is_on_stack(layout: Layout, marker: object) -> bool:
    """Whether an argument lies above the callable and the place for its owner, while the next one is computed."""
    found: bool = _last(marker, _is_at(FrameMemory(sys._getframe(), layout), marker))
    return found


def _is_at(memory: FrameMemory, marker: object) -> bool:
    return _word(memory._stack + 2 * _POINTER) == id(marker)


@functools.cache
def _references_of_one() -> int:
    """What `references` tells of an object that lies on the stack alone."""
    layout = _layout()
    return 0 if layout is None else _last(object(), FrameMemory(sys._getframe(), layout).references(2))


def _last(first: object, last: Any) -> Any:
    return last
