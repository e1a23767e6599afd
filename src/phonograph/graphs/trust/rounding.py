"""Rounding: how far the order of additions alone may move each element of what a body computes.

Padding changes the kernels that are picked, and so how results are rounded. How much that may be differs from element
to element: a small number may be the difference of two large ones, or may have been small all the way. So the body is
run again with the inputs of every op changed by a share of a rounding, at random, and every element is allowed what it
moved by then. This tells a leak of 0.1 from the noise of a number of 1e6 in the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from phonograph.devices.trace import OpWatch, uncompiled, written_tensors

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What two results of one dtype may differ by, relative to their size, for all the roundings of a forward pass."""
_NEAR_OTHERS = 1e-1
_NUM_RUNS = 4
_SHARE = 16
"""The inputs of an op are changed by this part of `NEAR`, and the moves of a result count as many times."""
_MAX_CHANGED_BYTES = 64 << 20
"""A larger tensor (a cache, an embedding) is left as it is: the other input of its op is changed."""

Values = Mapping[Any, Any]


def near_of(dtype: torch.dtype) -> float:
    """The relative difference that roundings may make in results of this dtype."""
    if dtype.is_complex:
        return NEAR[torch.float32 if dtype == torch.complex64 else torch.float64]
    return NEAR.get(dtype, _NEAR_OTHERS)


class Rounding:
    """What rounding may move each result of one run by; found when it is first asked for."""

    def __init__(self, run: Callable[[AbstractContextManager[None]], Values], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._moves: dict[Any, torch.Tensor] | None = None

    def allowed(self, name: Any, wanted: torch.Tensor) -> torch.Tensor | None:
        """By element, not finite where that is not known; None where the runs tell nothing, because they fail or none
        of their ops can be seen."""
        if self._moves is None:
            self._moves = self._found()
        moved = self._moves.get(name)
        return moved * _SHARE if moved is not None and moved.shape == wanted.shape else None

    def _found(self) -> dict[Any, torch.Tensor]:
        try:
            wanted = self._run(_unchanged())
            moves: dict[Any, torch.Tensor] = {}
            for seed in range(_NUM_RUNS):
                found = self._run(_perturbed(seed, self._device))
                for name, value in wanted.items():
                    if _is_rounded(value) and _is_alike(found.get(name), value):
                        moved = (wide(found[name]) - wide(value)).abs()
                        moves[name] = torch.maximum(moves[name], moved) if name in moves else moved
        except Exception:
            return {}
        return moves if any(bool(moved.any()) for moved in moves.values()) else {}


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextmanager
def _perturbed(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, every op gets floating-point inputs that are changed by a share of a rounding."""
    numbers = {on: torch.Generator(on).manual_seed(seed + 1) for on in {torch.device("cpu"), device}}

    def changed(tensor: Any) -> Any:
        if not _is_rounded(tensor) or tensor.device not in numbers or tensor.nbytes > _MAX_CHANGED_BYTES:
            return tensor
        noise = torch.randn(tensor.shape, generator=numbers[tensor.device], device=tensor.device)
        factor = 1 + noise.to(_factor_dtype(tensor.dtype)) * (near_of(tensor.dtype) / _SHARE)
        return (tensor * factor).to(tensor.dtype)

    def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        written = {id(tensor) for tensor in written_tensors(func, args, kwargs)}
        if _makes_views(func):
            return func(*args, **kwargs)
        args, kwargs = tree_map(
            lambda leaf: leaf if id(leaf) in written else changed(leaf),
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, torch.Tensor),
        )
        return func(*args, **kwargs)

    with uncompiled(), OpWatch(run):
        yield


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """What holds a factor that is nearly 1."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _makes_views(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)


def _is_rounded(value: Any) -> bool:
    """Whether a value is a tensor of numbers that are rounded, in a dtype that torch computes with."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def _is_alike(found: Any, wanted: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and found.dtype == wanted.dtype


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that holds their differences."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
