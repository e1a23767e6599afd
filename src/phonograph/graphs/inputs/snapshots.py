"""Value snapshots: a value as it is now, so that a later change, or another value in its place, is noticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from phonograph.graphs.inputs.fields import Path
from phonograph.graphs.inputs.tree import attributes

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


def snapshots_without(fields: Mapping[Any, Any], left_out: Collection[Path]) -> dict[Any, Any]:
    """A snapshot of every field, without what is at the paths left out; a field that holds such a path is opened."""
    taken: dict[Any, Any] = {}
    for name, value in fields.items():
        below = [path[1:] for path in left_out if path[0] == name]
        if () not in below:
            taken[name] = _holder(value, below) if below else snapshot(value)
    return taken


def _holder(value: Any, left_out: Collection[Path]) -> Any:
    if isinstance(value, Mapping):
        fields: Mapping[Any, Any] = value
    else:
        fields = value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else dict(attributes(value))
    return (type(value), snapshots_without(fields, left_out)) if fields else snapshot(value)
