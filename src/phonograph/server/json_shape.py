"""Size and depth of a JSON text, counted without decoding it: what it would take is known before it is taken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BLOCK = 64 << 10
"""Bytes that are looked at in one go: Python's lock is free between blocks."""
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")


@dataclass(frozen=True)
class Shape:
    """Of well-formed JSON exactly; of anything else some numbers, and the decoder says what is wrong."""

    values: int
    """Lists, objects and what they hold; an empty one counts twice."""
    containers: int
    """Lists and objects."""
    depth: int


def shape_of(data: bytes, most_values: int) -> Shape:
    """Count values, lists and levels; counting ends above so many values."""
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"__")  # from here on a quote after a backslash is always part of a text
    codes = np.frombuffer(data, np.uint8)
    commas, containers, depth, deepest, in_text, after_backslash = 0, 0, 0, 0, False, False
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
        if containers + commas >= most_values:
            break
    return Shape(1 + containers + commas, containers, deepest)
