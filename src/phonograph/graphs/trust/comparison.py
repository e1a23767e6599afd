"""Comparison: two results element by element, each judged by its own size and by what rounding may move it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from phonograph.graphs.trust.rounding import near_of, wide

Allowed = Callable[[torch.Tensor], Iterable[torch.Tensor | None]]
"""Takes the wanted values; yields what rounding may move each of them by, or None where that is not known, each time
after a longer look."""


def mismatch(found: Any, wanted: Any, *, tolerance: float | None = 0.0, allowed: Allowed | None = None) -> str:
    """What is wrong with a result, in words; empty where nothing is.

    At a tolerance of 0 the values must be equal; None is the tolerance of the dtype. What is no tensor is not compared.
    """
    if not isinstance(wanted, torch.Tensor):
        return ""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return f"has shape {tuple(getattr(found, 'shape', ()))}, expected {tuple(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"is {found.dtype}, expected {wanted.dtype}"
    wrong = differing(found, wanted, tolerance=tolerance, allowed=allowed)
    return described(found, wanted, wrong) if bool(wrong.any()) else ""


def differing(
    found: torch.Tensor,
    wanted: torch.Tensor,
    *,
    tolerance: float | None = 0.0,
    allowed: Allowed | None = None,
    among: torch.Tensor | None = None,
) -> torch.Tensor:
    """Where two tensors of one shape and dtype differ by more than they may; only `among` these, if that is given."""
    one, other = _computed_with(found), _computed_with(wanted)
    wrong = (one != other) & ~(one.isnan() & other.isnan())
    if among is not None:
        wrong &= among
    if tolerance == 0.0 or not bool(wrong.any()):
        return wrong
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return _not_flipped(wrong, wanted, allowed)
    default = near_of(wanted.dtype)
    near = default if tolerance is None else tolerance
    apart, size = (wide(one) - wide(other)).abs(), wide(other).abs()
    floor = torch.finfo(other.dtype).tiny  # below it numbers lose their digits one by one
    wrong &= ~((apart <= near * size + floor) & apart.isfinite())  # what is not finite must be equal
    if not bool(wrong.any()):
        return wrong
    by_row = near * _scale(size)
    for moved in allowed(wanted) if allowed is not None else (None,):
        room = torch.where(moved.isfinite(), moved * (near / default), by_row) if moved is not None else by_row
        wrong = wrong & ~((apart <= near * size + room) & apart.isfinite())
        if not bool(wrong.any()):
            break
    return wrong


def _not_flipped(wrong: torch.Tensor, wanted: torch.Tensor, allowed: Allowed | None) -> torch.Tensor:
    """Of integers that differ, those that rounding never changed: it decides what is picked among near equals."""
    for moved in allowed(wanted) if allowed is not None else ():
        if moved is not None:
            wrong = wrong & (moved == 0)
        if not bool(wrong.any()):
            break
    return wrong


def described(found: torch.Tensor, wanted: torch.Tensor, wrong: torch.Tensor) -> str:
    """The largest of the differences, where it is, and how many there are."""
    one, other = wide(_computed_with(found)), wide(_computed_with(wanted))
    apart = torch.where(wrong, (one - other).abs().nan_to_num(math.inf, math.inf), -1.0)
    place = int(apart.flatten().argmax().item())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), apart.shape)] if apart.dim() else []
    there = f"{one.flatten()[place].item():.6g} for {other.flatten()[place].item():.6g} at {index}, "
    count = int(wrong.sum().item())
    by = abs(one.flatten()[place].item() - other.flatten()[place].item())
    return f"differs by up to {by:.3g} ({there}{count:,} of {wrong.numel():,} elements)"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype have the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize)
    if bits is None:
        return one == other
    return one.contiguous().view(bits) == other.contiguous().view(bits)


def _scale(size: torch.Tensor) -> torch.Tensor:
    """The largest finite value of each row."""
    finite = torch.where(size.isfinite(), size, 0.0)
    if finite.dim() < 2 or not finite.numel():
        return finite.max() if finite.numel() else finite
    return finite.flatten(1).amax(1).reshape(-1, *[1] * (finite.dim() - 1))


def _computed_with(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch computes with: it only stores floats of one byte, and odd integers."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.float()
    return tensor.to(torch.int64) if tensor.dtype in (torch.uint16, torch.uint32) else tensor
