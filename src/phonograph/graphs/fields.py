"""Reads and replaces the fields of a user's batch: any object or mapping, with dotted paths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]


def fetch(batch: Any, beside: Mapping[str, Any], path: Path) -> Any:
    """The value at a path, or None where a part of the path is missing or None.

    A path whose first part names something passed beside the batch starts there.
    """
    value = beside[path[0]] if path[0] in beside else _get(batch, path[0])
    for part in path[1:]:
        if value is None:
            return None
        value = _get(value, part)
    return value


def expose(batch: Any, values: Mapping[Path, Any]) -> Any:
    """A copy of the batch with these fields replaced; nothing that the batch holds is modified."""
    plain = {path[0]: value for path, value in values.items() if len(path) == 1}
    nested: dict[str, dict[Path, Any]] = {}
    for path, value in values.items():
        if len(path) > 1:
            nested.setdefault(path[0], {})[path[1:]] = value
    for head, below in nested.items():
        holder = _get(batch, head)
        if holder is not None:
            plain[head] = expose(holder, below)
    return _replaced(batch, plain)


def _get(holder: Any, name: str) -> Any:
    if type(holder) is dict or isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)


def _replaced(holder: Any, values: dict[str, Any]) -> Any:
    if type(holder) is dict:
        return holder | values
    if isinstance(holder, Mapping):
        replaced = copy.copy(holder)
        for name, value in values.items():
            replaced[name] = value  # type: ignore[index]
        return replaced
    if hasattr(holder, "__dict__"):
        # Without __init__ and __setattr__: a frozen dataclass is copied like any other object.
        replaced = type(holder).__new__(type(holder))
        replaced.__dict__.update(holder.__dict__)
        replaced.__dict__.update(values)
        return replaced
    replaced = copy.copy(holder)
    for name, value in values.items():
        object.__setattr__(replaced, name, value)
    return replaced
