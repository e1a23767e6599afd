"""Walks the tensors in what a forward pass or a gap returns: tensor, tuple, list, dict, dataclass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is not a container, with its dotted path; None is a leaf."""
    items = _items(tree)
    if items is None:
        yield path, tree
        return
    for name, value in items:
        yield from leaves(value, f"{path}.{name}" if path else str(name))


def map_leaves(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """The same structure with every leaf replaced by `change(path, leaf)`; the tree itself is not modified."""
    items = _items(tree)
    if items is None:
        return change(path, tree)
    changed = [map_leaves(value, change, f"{path}.{name}" if path else str(name)) for name, value in items]
    if isinstance(tree, Mapping) and not dataclasses.is_dataclass(tree):
        if type(tree) is dict:
            return dict(zip(tree.keys(), changed, strict=True))
        rebuilt = copy.copy(tree)
        for key, value in zip(tree.keys(), changed, strict=True):
            rebuilt[key] = value  # type: ignore[index]
        return rebuilt
    if isinstance(tree, tuple):
        return type(tree)(*changed) if hasattr(tree, "_fields") else tuple(changed)
    if isinstance(tree, list):
        return changed
    rebuilt = copy.copy(tree)
    for (name, _), value in zip(items, changed, strict=True):
        try:
            setattr(rebuilt, name, value)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(rebuilt, name, value)
    return rebuilt


def _items(tree: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container by name, or None for a leaf."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, tuple | list):
        return list(enumerate(tree))
    return None
