"""Number checks: values from users and files, whole or finite, within bounds; else an error that says so."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TypeGuard

MAX_WHOLE = 2**63 - 1
"""What tensors and other programs hold."""
_MAX_SHOWN = 40


def is_whole(value: object, least: int = -MAX_WHOLE, most: int = MAX_WHOLE) -> TypeGuard[int]:
    """Whether it is an integer within bounds. A bool, an int to Python, is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number of any size, infinite and NaN included; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold."""
    return is_number(value) and abs(value) <= sys.float_info.max


def expect_whole(
    name: str, value: object, error: Callable[[str], Exception], *, least: int | None = None, most: int = MAX_WHOLE
) -> int:
    """A whole number within bounds, else the error."""
    if is_whole(value, -MAX_WHOLE if least is None else least, most):
        return value
    # The 64-bit bound is mentioned only where the number exceeds it.
    is_past = isinstance(value, int) and value > most
    ceiling = most if most != MAX_WHOLE or is_past else None
    raise error(f"{name} must be a whole number{_bounds(least, ceiling)}, found {shown(value)}.")


def expect_finite(
    name: str,
    value: object,
    error: Callable[[str], Exception],
    *,
    least: float = -math.inf,
    most: float = math.inf,
    open_below: bool = False,
) -> float:
    """A finite number within bounds, else the error; `open_below` leaves `least` itself out."""
    if is_finite(value) and least <= value <= most and not (open_below and value == least):
        return value
    floor, ceiling = (bound if math.isfinite(bound) else None for bound in (least, most))
    bounds = _bounds(floor, ceiling, open_below=open_below)
    raise error(f"{name} must be a finite number{bounds}, found {shown(value)}.")


def shown(value: object) -> str:
    """A wrong value as an error shows it: with its type, never long, and never an error itself."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no number of thousands of digits, and no endless nesting
        text = "a value too large to show"
    return f"{text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + '...'} ({type(value).__name__})"


def _bounds(least: float | None, most: float | None, *, open_below: bool = False) -> str:
    floor = [] if least is None else [f"{'above' if open_below else 'of at least'} {least}"]
    ceiling = [] if most is None else [f"{'' if floor else 'of '}at most {most}"]
    return "".join(f" {part}" for part in [" and ".join([*floor, *ceiling])] if part)
