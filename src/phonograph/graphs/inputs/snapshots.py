"""Value snapshots: a value as it is now, so that a later change, or another value in its place, is noticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from phonograph.graphs.inputs.fields import Path
from phonograph.graphs.inputs.tree import attributes

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.device)


class Same:
    """An object compared by identity: a module, a configuration; of tensors, memory, shape and strides."""

    def __init__(self, value: Any) -> None:
        self._value = value  # held, so that neither its id() nor its memory is reused

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        one, two = self._value, other._value
        return one is two or (type(one) is type(two) is torch.Tensor and _seen(one) == _seen(two))


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.numel() > 0, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def snapshot(value: Any) -> Any:
    """Equal to another snapshot only if type and content are: containers and frozen dataclasses by their items, and
    -0.0 is not 0.0."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if isinstance(value, dict):
        return (type(value), [(snapshot(key), snapshot(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [snapshot(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(repr(item) for item in value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (type(value), value.dtype, value.shape, value.tobytes())
    declared: Any = getattr(type(value), "__dataclass_params__", None)
    if declared is not None and declared.frozen:
        return (type(value), [snapshot(getattr(value, one.name)) for one in fields(value)])
    return Same(value)


def snapshots_without(given: Mapping[Any, Any], left_out: Collection[Path]) -> dict[Any, Any]:
    """A snapshot of every field, without what is at the paths left out; a field that holds such a path is opened."""
    taken: dict[Any, Any] = {}
    for name, value in given.items():
        below = [path[1:] for path in left_out if path[0] == name]
        if () not in below:
            taken[name] = _holder(value, below) if below else snapshot(value)
    return taken


def _holder(value: Any, left_out: Collection[Path]) -> Any:
    if isinstance(value, Mapping):
        held: Mapping[Any, Any] = value
    else:
        held = value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else dict(attributes(value))
    return (type(value), snapshots_without(held, left_out)) if held else snapshot(value)
