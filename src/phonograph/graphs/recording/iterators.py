"""Iterator positions: how far an iterator is, told without a step of it, and how one is set back."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from phonograph.graphs.recording.places import Place, same

_MAX_LEFT = 1 << 16
_MAPPING: dict[int, int] = {}
_EMPTY: tuple[Any, ...] = (
    [],
    (),
    "",
    b"",
    range(0),
    range(1 << 64),
    set(),
    _MAPPING,
    _MAPPING.values(),
    _MAPPING.items(),
)
_TELLING: tuple[type, ...] = (itertools.count, *(type(iter(one)) for one in _EMPTY))
"""Iterators that tell their position. Others (map, zip) hold iterators, or run code (generators)."""


class Position:
    """How far an iterator was. It is put back by another one that is as far, in the place where it was found."""

    def __init__(self, holder: Any, where: Place, key: Any) -> None:
        self.holder = holder
        self._where = where
        self._key = key
        self.then = self.get(None)

    def get(self, key: Any) -> Any:
        found = self._where.get(self._key)
        return _position(found if type(found) in _TELLING else self.holder)

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        now = self.get(None)
        if not same(self.then, now):
            yield None, self.then, now

    def put(self, key: Any, value: Any) -> None:
        make, given, *state = value
        made = make(*given)
        for one in state:
            made.__setstate__(one)
        self._where.put(self._key, made)

    def restore(self) -> None:
        for key, value, _ in list(self.changed()):
            self.put(key, value)


def tells_position(iterator: Any) -> bool:
    """Whether an iterator can be followed: it tells its position, and what is left of it is not long."""
    if type(iterator) not in _TELLING:
        return False
    try:
        _position(iterator)
        return type(iterator) is itertools.count or operator.length_hint(iterator) <= _MAX_LEFT
    except (RuntimeError, ValueError, SyntaxError):  # a dict that was changed meanwhile; a count of other numbers
        return False


def _position(iterator: Any) -> Any:
    """A function, its arguments, and the state of what it gives: together an iterator that is as far."""
    if type(iterator) is itertools.count:  # newer versions of Python don't copy it
        return itertools.count, ast.literal_eval(repr(iterator).removeprefix("count")[:-1] + ",)")
    return iterator.__reduce__()
