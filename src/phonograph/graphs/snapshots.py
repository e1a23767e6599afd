"""Remembers a value as it is now, so that a later change of it, or another value in its place, is noticed."""

from __future__ import annotations

from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Same:
    """An object that can only be recognised: a tensor, a module, a configuration."""

    def __init__(self, value: Any) -> None:
        self._value = value  # held, so that its identity is not given to another

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value


def snapshot(value: Any) -> Any:
    """Equal to another snapshot only if type and content are: containers are looked into, numbers keep their sign."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if isinstance(value, dict):
        return (type(value), [(snapshot(key), snapshot(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [snapshot(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(repr(item) for item in value))
    return Same(value)
