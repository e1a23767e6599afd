"""Memory names: user-visible names of the tensors that a body reads: parameters, buffers, fields, closure variables."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from phonograph.graphs.inputs.tree import attributes

_MAX_DEPTH = 6
_MAX_OBJECTS = 20_000
_CLOSED = (str, bytes, int, float, complex, type, types.ModuleType, torch.device, torch.dtype)


def names_of_memory(code: Iterable[Any], batches: Iterable[Any] = ()) -> dict[int, str]:
    """By storage, the first and shortest name that leads there from the functions that are run, or from batches."""
    names: dict[int, str] = {}
    todo: deque[tuple[Any, str, int]] = deque(
        [*((one, "the batch", 0) for one in batches), *((f, "", 0) for f in code)]
    )
    seen: set[int] = set()
    while todo and len(seen) < _MAX_OBJECTS:
        value, name, depth = todo.popleft()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                names.setdefault(_identity(value), name or "a tensor")
        elif id(value) not in seen and depth < _MAX_DEPTH and not isinstance(value, _CLOSED):
            seen.add(id(value))
            name = name or (type(value).__name__ if isinstance(value, torch.nn.Module) else "")
            todo += [(part, ".".join(filter(None, (name, step))), depth + 1) for step, part in _parts(value)]
    return names


def _identity(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0  # a wrapper around tensors that have memory


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        # Below it, names are those of its state_dict.
        yield from [*value.named_parameters(), *value.named_buffers()]
        yield from ((str(name), one) for name, one in vars(value).items() if not str(name).startswith("_"))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))
        used = (name for name in value.__code__.co_names if name in value.__globals__)
        yield from ((name, value.__globals__[name]) for name in used)
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), *((str(at), one) for at, one in enumerate(value.args)), *value.keywords.items())
    elif isinstance(value, dict):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(at), one) for at, one in enumerate(value))
    else:
        yield from ((str(name), one) for name, one in attributes(value))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty cell raises
    except ValueError:
        return False
    return True
