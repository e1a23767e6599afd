"""Rounding: how far the order of additions alone may move each element of what a body computes.

Padding changes the kernels that are picked, and so how results are rounded. How much that may be differs from element
to element: a small number may be the difference of two large ones, or may have been small all the way. So the body is
run again with the inputs of every op changed by a share of a rounding, at random, and every element is allowed what it
moved by then. This tells a leak of 0.1 from the noise of a number of 1e6 in the same row. Kernels that torch does not
dispatch (Triton's) have what the body made for them changed where it is, before they are launched.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from phonograph.devices.launches import following_launches
from phonograph.devices.trace import OpWatch, tensors_in, uncompiled, written_tensors

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What two results of one dtype may differ by, relative to their size, for all the roundings of a forward pass."""
_NEAR_OTHERS = 1e-1
_FIRST_RUNS = (1, 2)
"""A token that was picked among near equals is another in every second run: mostly, few runs will do."""
_NUM_RUNS = (4, 16)
"""By four draws, one element in a million may seem not to move: among millions, those that look wrong get more."""
_SHARE = 16
"""The inputs of an op are changed by this part of `NEAR`, and the moves of a result count as many times."""
_LATER_SCALE = 4
"""The changes of later runs are larger: what is picked among near equals must flip in one of them."""
_OVERLAPS = 1
"""What torch answers about a tensor that has one element in several places."""
_MAX_WEIGHT_BYTES = 1 << 20
_MAX_CHANGED_BYTES = 64 << 20
"""A larger tensor (a cache, an embedding) is left as it is: the other input of its op is changed."""

Values = Mapping[Any, Any]


def near_of(dtype: torch.dtype) -> float:
    """The relative difference that roundings may make in results of this dtype."""
    if dtype.is_complex:
        return NEAR[torch.float32 if dtype == torch.complex64 else torch.float64]
    return NEAR.get(dtype, _NEAR_OTHERS)


class Rounding:
    """How far rounding may move each result of one run; computed on first use."""

    def __init__(self, run: Callable[[AbstractContextManager[None]], Values], *, is_thorough: bool = True) -> None:
        """With `is_thorough`, what looks wrong after few runs gets many."""
        self._run = run
        self._looks = _FIRST_RUNS + (_NUM_RUNS if is_thorough else _NUM_RUNS[:1])
        self._wanted: Values | None = None
        self._moves: dict[Any, torch.Tensor] = {}
        self._num_runs = 0

    def allowed(self, name: Any, wanted: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """By element, not finite where that is not known; None where the runs tell nothing, because they fail or none
        of their ops can be seen. Every further one is of more runs, and larger.

        An integer that some run has changed (a token picked among near equals) may be any other.
        """
        for num_runs in self._looks:
            self._run_until(num_runs)
            moved = self._moves.get(name)
            if moved is None and num_runs < _NUM_RUNS[0]:
                continue
            yield moved * _SHARE if moved is not None and moved.shape == wanted.shape else None

    def _run_until(self, num_runs: int) -> None:
        if num_runs <= self._num_runs:
            return
        try:
            if self._wanted is None:
                self._wanted = self._run(_unchanged())
            for seed in range(self._num_runs, num_runs):
                scale = _LATER_SCALE if seed >= _NUM_RUNS[0] else 1
                self._add_moves(self._wanted, self._run(_perturbed(seed, scale)), scale)
        except Exception:
            self._moves = {}
        self._num_runs = num_runs
        if not any(bool(moved.any()) for moved in self._moves.values()):
            self._moves = {}

    def _add_moves(self, wanted: Values, found: Values, scale: int) -> None:
        for name, value in wanted.items():
            if not _is_alike(found.get(name), value):
                continue
            if _is_rounded(value):
                moved = (wide(found[name]) - wide(value)).abs() / scale
            elif not value.is_floating_point():
                moved = (found[name] != value).double()
            else:
                continue
            before = self._moves.get(name)
            self._moves[name] = moved if before is None else torch.maximum(before, moved)


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextmanager
def _perturbed(seed: int, scale: int) -> Iterator[None]:
    """Inside, every op gets floating-point inputs that are changed by a share of a rounding, or a few of them."""
    changes = _Changes(seed, scale)
    with uncompiled(), following_launches(changes.add_launch), OpWatch(changes.run):
        yield


class _Changes:
    """Random changes of what ops and kernels read: until memory is written again, its numbers change in one way."""

    def __init__(self, seed: int, scale: int) -> None:
        self._share = scale / _SHARE
        self._contents = itertools.count(seed << 32)
        self._content_at: dict[int, int] = {}
        """By address: which content is there now."""
        self._made: set[int] = set()
        """Addresses of memory that ops of this run have made: a kernel's weights and caches are none of it."""

    def run(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """An op on changed copies of what it reads."""
        if _makes_views(func):
            return func(*args, **kwargs)
        written = list(written_tensors(func, args, kwargs))
        unread = tensors_in(args) if _reads_no_numbers(func) else self._weights(args, kwargs)
        left = {id(tensor) for tensor in (*written, *unread)}
        args, kwargs = tree_map(
            lambda leaf: leaf if id(leaf) in left else self._changed(leaf),
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, torch.Tensor),
        )
        result = func(*args, **kwargs)
        given = {_address(tensor) for tensor in tensors_in((args, kwargs))}
        made = {_address(tensor) for tensor in tensors_in(result)} - given
        if func.namespace == "aten":
            self._made |= made
        for address in made | {_address(tensor) for tensor in written}:
            self._content_at[address] = next(self._contents)
        return result

    def _weights(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[torch.Tensor]:
        """Large inputs of an op that the run has not made, where something else is changed: that will do."""
        given = list(tensors_in((args, kwargs)))
        others = [tensor for tensor in given if _address(tensor) not in self._made]
        return [tensor for tensor in others if tensor.nbytes > _MAX_WEIGHT_BYTES] if len(others) < len(given) else []

    def add_launch(self, name: str, grid: Any, arguments: Mapping[str, object]) -> None:
        """A kernel's arguments, where the run has made them: as they are about to be read, or overwritten."""
        with torch.no_grad(), _disable_current_modes():
            for tensor in tensors_in(list(arguments.values())):
                address = _address(tensor)
                factor = self._factor(tensor) if address in self._made else None
                if factor is not None and torch._debug_has_internal_overlap(tensor) != _OVERLAPS:
                    tensor.copy_(tensor * factor)
                    self._content_at[address] = next(self._contents)

    def _changed(self, tensor: Any) -> Any:
        factor = self._factor(tensor)
        return tensor if factor is None else (tensor * factor).to(tensor.dtype)

    def _factor(self, tensor: Any) -> torch.Tensor | None:
        """By what a tensor is changed; None for one that stays as it is."""
        if not _is_rounded(tensor) or tensor.nbytes > _MAX_CHANGED_BYTES:
            return None
        address = _address(tensor)
        content = self._content_at.setdefault(address, next(self._contents)) if address else next(self._contents)
        return _noise(tensor, content).mul_(near_of(tensor.dtype) * self._share).add_(1)


def _noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, by where each element lies in its memory: views of one place have the same.

    A wave whose frequency grows with the place: few launches, since a pass of small kernels is changed thousands of
    times.
    """
    numbers, on = random.Random(seed), tensor.device
    begin = int(tensor.storage_offset())
    if tensor.is_contiguous():
        places = torch.arange(begin, begin + tensor.numel(), dtype=torch.float64, device=on).reshape(tensor.shape)
    else:
        places = torch.full((), begin, dtype=torch.float64, device=on)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            steps = torch.arange(size, dtype=torch.float64, device=on) * stride
            places = places + steps.reshape(-1, *[1] * (tensor.dim() - dim - 1))
    phases = places.mul(numbers.uniform(1, 2)).add_(numbers.uniform(100, 200)).mul_(places).add_(numbers.uniform(0, 7))
    return phases.sin_().mul_(2**0.5)


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _makes_views(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)


def _reads_no_numbers(func: Any) -> bool:
    """Whether an op takes the shape, dtype and device of a tensor alone: of a whole cache, for a few rows."""
    name: str = func._schema.name
    return bool(func.namespace == "aten" and (name.startswith("aten::new_") or name.endswith("_like")))


def _is_rounded(value: Any) -> bool:
    """Whether a value is a tensor of numbers that are rounded, in a dtype that torch computes with."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def _is_alike(found: Any, wanted: Any) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return False
    return found.shape == wanted.shape and found.dtype == wanted.dtype and found.layout is torch.strided


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that holds their differences."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
