"""Dict memory: the version tags of many dicts, read from memory in one go, which tells that none was stored into.

Until 3.11 CPython gives a dict another tag with every store, and no function to ask for it. torch's guards have one,
which takes ten times as long for many dicts, and needs torch's compiler.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_WORD = 8
_NUM_WORDS = 1 << 53
"""More than there are from any address on: no word is read but those of tags."""


def unchanged_tags(dicts: Sequence[dict[Any, Any]], tag_of: Callable[[Any], int] | None) -> Callable[[], bool] | None:
    """A function that tells whether all tags are what they are now; None where they can't be found.

    `tag_of` tells the tag of one dict. The function keeps the dicts alive.
    """
    offset = _offset(tag_of) if tag_of is not None else None
    if offset is None:
        return None
    held, first = tuple(dicts), min(map(id, dicts))
    memory: Any = (ctypes.c_uint64 * _NUM_WORDS).from_address(first)
    words: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
    words.flags.writeable = False
    places = np.array([(id(one) - first + offset) // _WORD for one in held], np.intp)
    then = words[places].tobytes()

    def are_unchanged(held: tuple[dict[Any, Any], ...] = held) -> bool:
        return words[places].tobytes() == then

    return are_unchanged


@functools.cache
def _offset(tag_of: Callable[[Any], int]) -> int | None:
    """Where a dict has its tag, if that can be told: the one word that is it for several dicts, before and after
    stores, which leave all else as it is."""
    if sys.version_info >= (3, 12) or sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    toys: list[dict[Any, Any]] = [{"a": 1}, {"a": 1, "b": 2}, {3: 4}, dict.fromkeys(range(100))]
    places = list(range(2 * _WORD, dict.__basicsize__, _WORD))
    for _ in range(3):
        tags = [tag_of(toy) for toy in toys]
        places = [at for at in places if [_word(id(toy) + at) for toy in toys] == tags]
        for toy in toys:
            toy[next(iter(toy))] = object()
        if any(tag_of(toy) == tag for toy, tag in zip(toys, tags, strict=True)):
            return None
    return places[0] if len(places) == 1 else None


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
