"""Batch fields: reading and replacing them by dotted path, in any object or mapping."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from phonograph.errors import LoadError

Path = tuple[str, ...]


def path_of(field: str) -> Path:
    """The parts of a dotted field name."""
    return tuple(field.split("."))


def fetch(batch: Any, kwargs: Mapping[str, Any], path: Path) -> Any:
    """The value at a path, or None where a part of the path is missing or None.

    A path whose first part names a keyword argument starts there.
    """
    value = kwargs[path[0]] if path[0] in kwargs else _get(batch, path[0])
    for part in path[1:]:
        if value is None:
            return None
        value = _get(value, part)
    return value


def expose(batch: Any, values: Mapping[Path, Any]) -> Any:
    """A copy of the batch with these fields replaced; nothing that the batch holds is modified.

    What lies below a holder that is None or missing is dropped: there is no object to copy.
    """
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


def fields_of(batch: Any) -> list[Any]:
    """The values of all fields but arrays, as far as the batch itself holds them."""
    fields: Mapping[str, Any] = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
    return [value for value in fields.values() if not isinstance(value, torch.Tensor | np.ndarray)]


def _get(holder: Any, name: str) -> Any:
    kind: Any = type(holder)
    if kind is dict or _is_mapping(kind):
        return holder.get(name)
    return getattr(holder, name, None)


@lru_cache(maxsize=1024)
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, Mapping)


@lru_cache(maxsize=1024)
def _is_only_dict(kind: Any) -> bool:
    """Whether an instance is its `__dict__` and nothing else, so that copying that copies it."""
    return (
        kind.__new__ is object.__new__
        and not hasattr(kind, "__copy__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def _replaced(holder: Any, values: dict[str, Any]) -> Any:
    if type(holder) is dict:
        return holder | values
    if isinstance(holder, MutableMapping):
        replaced = copy.copy(holder)
        replaced.update(values)
        return replaced
    if isinstance(holder, Mapping):
        return dict(holder) | values
    if isinstance(holder, tuple) and hasattr(holder, "_replace"):
        return holder._replace(**values)
    replaced = _copied(holder)
    for name, value in values.items():
        _put(replaced, name, value)
    return replaced


def _copied(holder: Any) -> Any:
    kind: Any = type(holder)
    if not _is_only_dict(kind):
        return copy.copy(holder)
    copied = object.__new__(kind)  # without __init__, which may do work or want arguments
    copied.__dict__.update(holder.__dict__)
    return copied


def _put(holder: Any, name: str, value: Any) -> None:
    try:
        object.__setattr__(holder, name, value)  # past the __setattr__ of a frozen dataclass
    except AttributeError:
        raise LoadError(
            f"exposing the view's {name!r}: {type(holder).__name__} has no such field that can be set. "
            "Make it a plain attribute (no read-only property; named in __slots__ where the class has them)."
        ) from None
