"""Stand-in: an equal but distinct object in place of a value, to see whether a run writes the same value again."""

from __future__ import annotations

from typing import Any


class _Int(int):
    """A number, or a truth value."""


class _Float(float):
    """A number."""


class _Text(str):
    """A text."""

    __slots__ = ()


def stand_in_for(value: Any) -> Any:
    """An equal value that is another object; None where there is none."""
    if type(value) in (int, bool):
        return _Int(value)
    if type(value) is float:
        return _Float(value)
    if type(value) is str:
        return _Text(value)
    if isinstance(value, tuple) and value and all(type(one) in (int, float, str, bool) for one in value):
        # Tuples of one content may be one object: an item makes it another.
        return type(value)([stand_in_for(value[0]), *value[1:]]) if not hasattr(value, "_fields") else None
    return None
