"""Twins: a tree of modules that shares weights with another, and has some modules replaced.

The other tree stays as it is: whoever holds it computes what was always computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fused:
    """What became of a tree."""

    layers: Any
    """A twin of it, or the tree itself where nothing was replaced."""
    notes: tuple[str, ...]
    """What was found of each class, for `explain`."""


def reached(root: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a tree by name, each once, as far as a twin of it can have others in their place.

    A module with a `forward` of its own is a leaf: that may be bound to the module, and run what is below it there.
    """
    found, waiting = set[int](), [("", root)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in found:
            continue
        found.add(id(module))
        yield name, module
        if "forward" not in vars(module):
            below = [(f"{name}.{key}".lstrip("."), one) for key, one in module._modules.items() if one is not None]
            waiting += reversed(below)


def twin_of(root: Any, replaced: Mapping[int, Any]) -> Any:
    """The tree with other modules in the place of those with these ids, which `reached` gives.

    Modules on the way to one are copied, and share parameters, buffers and hooks with their originals; all others are
    the same objects.
    """
    return _twin(root, replaced, {})


def _twin(module: Any, replaced: Mapping[int, Any], made: dict[int, Any]) -> Any:
    known = replaced.get(id(module), made.get(id(module)))
    if known is not None:
        return known
    twin = module
    if "forward" not in vars(module):
        below = {key: None if one is None else _twin(one, replaced, made) for key, one in module._modules.items()}
        if any(below[key] is not one for key, one in module._modules.items()):
            twin = copy.copy(module)
            twin._modules = below
    made[id(module)] = twin
    return twin


def form(x: torch.Tensor) -> tuple[Any, ...]:
    """All of a result but its values. A dim of one element has any stride."""
    return x.shape, x.dtype, x.device, [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
