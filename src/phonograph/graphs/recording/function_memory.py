"""Function memory: the pointers to a function's code and defaults, which tell in one comparison that both are the same.

Python's own way to them, `function.__code__`, raises an audit event each time. Where somebody listens (filelock does,
and with it whoever imports transformers), that takes ten times as long.
"""

from __future__ import annotations

import ctypes
import functools
import types
from typing import Any

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_SEARCHED = range(2 * _POINTER, 16 * _POINTER, _POINTER)


def pointers_of(function: types.FunctionType) -> ctypes.Array[ctypes.c_char] | None:
    """Code and defaults of a function, as they are whenever `raw` is asked for; None on a Python with other functions.

    The function must be kept alive.
    """
    offset = _offset()
    return None if offset is None else _pair_at(id(function) + offset)


def _pair_at(address: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * (2 * _POINTER)).from_address(address)


@functools.cache
def _offset() -> int | None:
    """Where a function has its code, followed by its defaults, if both can be told."""

    def one(number: int = 1) -> int:
        return number

    def other(number: int = 2) -> int:
        return number

    found = [at for at in _SEARCHED if all(_is_pair(function, at) for function in (one, other))]
    if len(found) != 1:
        return None
    held = _pair_at(id(one) + found[0])
    before = held.raw
    one.__defaults__ = (3,)
    return found[0] if held.raw != before and _is_pair(one, found[0]) else None


def _is_pair(function: Any, offset: int) -> bool:
    wanted = [ctypes.c_ssize_t(id(part)) for part in (function.__code__, function.__defaults__)]
    return bool(_pair_at(id(function) + offset).raw == b"".join(map(bytes, wanted)))
