"""JSON shape: values and depth of a JSON text, counted before it is decoded, so that decoding has a bounded cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BLOCK = 64 << 10
"""Bytes that are scanned at a time: the GIL is released between blocks."""
_QUOTE, _BACKSLASH, _COMMA, _POINT = ord('"'), ord("\\"), ord(","), ord(".")
SHORT = 20
"""Characters of a number, up to which it is quick to read."""


@dataclass(frozen=True)
class Shape:
    """Exact for well-formed JSON; for anything else the numbers mean nothing, and the decoder reports what is wrong."""

    values: int
    """Lists, objects and what they hold; an empty one counts twice."""
    containers: int
    """Lists and objects."""
    depth: int
    fractions: int
    """Numbers with a point."""
    exponents: int
    """Numbers with an exponent."""
    further_digits: int
    """Characters of numbers after their 20th."""

    def __add__(self, other: Shape) -> Shape:
        """The shape of two texts together."""
        return Shape(
            self.values + other.values,
            self.containers + other.containers,
            max(self.depth, other.depth),
            self.fractions + other.fractions,
            self.exponents + other.exponents,
            self.further_digits + other.further_digits,
        )


def shape_of(data: bytes, most_values: int) -> Shape:
    """Count values, lists and levels; counting ends above `most_values`."""
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"__")  # from here on a quote after a backslash is always inside a string
    codes = np.frombuffer(data, np.uint8)
    commas, containers, depth, deepest, in_text, after_backslash = 0, 0, 0, 0, False, False
    numbers = _Numbers()
    for start in range(0, len(codes), _BLOCK):
        block = codes[start : start + _BLOCK]
        quotes = block == _QUOTE
        quotes[1:] &= block[:-1] != _BACKSLASH
        quotes[0] &= not after_backslash
        outside = np.logical_xor.accumulate(quotes) == in_text
        in_text ^= bool(np.count_nonzero(quotes) % 2)
        after_backslash = bool(block[-1] == _BACKSLASH)
        # [ and { are 0x5B and 0x7B, ] and } are 0x5D and 0x7D: alike but for one bit.
        alike = block | 0x20
        opens, closes = (alike == ord("{")) & outside, (alike == ord("}")) & outside
        containers += int(np.count_nonzero(opens))
        commas += int(np.count_nonzero((block == _COMMA) & outside))
        levels = depth + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int64)
        depth, deepest = int(levels[-1]), max(deepest, int(levels.max()))
        numbers.add(block, outside)
        if containers + commas >= most_values:
            break
    return Shape(
        1 + containers + commas, containers, deepest, numbers.fractions, numbers.exponents, numbers.further_digits
    )


class _Numbers:
    """Counts what makes numbers slow to decode, block by block; a number may straddle two blocks."""

    def __init__(self) -> None:
        self.fractions = self.exponents = self.further_digits = 0
        self._before = np.zeros(SHORT, np.bool_)  # which of the last characters belong to a number

    def add(self, block: npt.NDArray[np.uint8], outside: npt.NDArray[np.bool_]) -> None:
        """The next block, and which of its characters are outside of strings."""
        if not outside.any():
            self._before = np.zeros(SHORT, np.bool_)
            return
        points = (block == _POINT) & outside
        digits = (block - ord("0") <= 9) & outside  # unsigned: characters below "0" wrap around to far above 9
        found = np.concatenate((self._before, digits | points))
        # Of the words that JSON has outside of texts, true and false have an e, and no digit before it.
        self.exponents += int(np.count_nonzero(((block | 0x20) == ord("e")) & outside & found[SHORT - 1 : -1]))
        self.fractions += int(np.count_nonzero(points))
        so_far = np.cumsum(found, dtype=np.int32)
        so_far[SHORT + 1 :] -= so_far[: -SHORT - 1].copy()  # of the last 21 characters, how many are of a number
        self.further_digits += int(np.count_nonzero(so_far[SHORT:] > SHORT))
        self._before = found[-SHORT:]
