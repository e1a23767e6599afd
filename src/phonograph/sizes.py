"""Sizes: integer arithmetic for tensors, grids and pages."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """How many parts of `divisor` hold `number`. On the host triton.cdiv would cost as much as an op."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is at least `number`."""
    return -(-number // multiple) * multiple


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
