"""Packed values: what the source of a column gives for sequences, as bytes of the column's type; nothing is cast.

A value that the type can't hold is refused with the names of the column and of the request. Python's `struct` checks
while it packs; numpy casts in silence.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from phonograph.engine.state.column import Array, Column, RowSource, TableSizes, Width
from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.values import numpy_dtype
from phonograph.numbers import shown

_CODES = {"bool": "?", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "int8": "b", "int16": "h",
          "int32": "i", "int64": "q", "float16": "e", "float32": "f", "float64": "d"}  # fmt: skip
_NO_VALUE = (struct.error, OverflowError, TypeError, ValueError)


def packed_rows(rows: Many[int]) -> bytes:
    """Numbers of rows, or of places, as int64."""
    return struct.pack(f"={len(rows)}q", *rows)


class Packing:
    """How the values of one column become bytes."""

    def __init__(self, column: Column, sizes: TableSizes) -> None:
        self._column = column
        self.width = sizes.width(column.width)
        self._num_places = (sizes.max_seqs + 1) * self.width
        kind = numpy_dtype(column.dtype)
        assert kind is not None
        self._kind = kind
        self._code = _CODES[kind.name]
        # Bits that a grammar leaves out forbid their tokens, and those past the vocabulary can't be picked.
        self._takes_any_length = column.width is Width.BITS
        self._fill = 0 if self._takes_any_length else column.default

    def numbers(self, values: list[Any], sources: Many[RowSource] = ()) -> bytes:
        """One number for each of these sequences."""
        try:
            if self._code == "?" and not all(map(_is_truth, values)):
                raise TypeError
            return struct.pack(f"={len(values)}{self._code}", *values)
        except _NO_VALUE:
            place = next(place for place, value in enumerate(values) if not self._holds(value))
            raise self._refused(values[place], f"a number that {self._kind} holds", sources, place) from None

    def rows(self, values: Many[Any], sources: Many[RowSource]) -> bytes:
        """A row for each of these sequences; where one is short, the default follows."""
        whole = np.full((len(values), self.width), self._fill, dtype=self._kind)
        for place, value in enumerate(values):
            row = self._array(value, sources[place])
            count = len(row)
            if count > self.width:
                if not self._takes_any_length:
                    raise self._refused(value, f"{self.width} values at most", sources, place)
                count = self.width
            whole[place, :count] = row[:count]
        return whole.tobytes()

    def pairs(self, found: Any, source: RowSource) -> tuple[Array, bytes] | None:
        """(places, values) of a sequence, or None where it has none."""
        if not (isinstance(found, tuple) and len(found) == 2):
            raise self._refused(found, "a tuple of all indices and all values", (source,))
        indices, values = found
        try:
            num, num_values = len(indices), len(values)
        except TypeError:
            num, num_values = 0, 1
        if num != num_values:
            raise self._refused(found, "as many indices as values", (source,))
        if not num:
            return None
        inside = np.asarray(indices)
        if inside.dtype.kind not in "iu" or inside.ndim != 1:
            raise self._refused(indices, "indices that are whole numbers", (source,))
        if inside.min() < 0 or inside.max() >= self.width:
            # On the device it would be a place in another sequence's row.
            wrong = next(int(index) for index in inside if not 0 <= index < self.width)
            raise self._no_place(wrong)
        packed = (
            self.numbers(values, [source] * num) if isinstance(values, list) else self._array(values, source).tobytes()
        )
        return inside.astype(np.int64, copy=False) + source.sequence.row * self.width, packed

    def changes(self, changes: Many[tuple[int, int, Any]]) -> tuple[bytes, bytes]:
        """(places, values) that a step lists; few, so that lists are faster than arrays."""
        width = self.width
        indices = [index for _, index, _ in changes]
        try:
            if min(indices) < 0 or max(indices) >= width:
                raise self._no_place(next(index for index in indices if not 0 <= index < width))
            places = [row * width + index for row, index, _ in changes]
            if min(places) < width or max(places) >= self._num_places:
                raise self._refused(changes, "rows of sequences", ())
            return packed_rows(places), self.numbers([value for _, _, value in changes])
        except _NO_VALUE:
            raise self._refused(changes, "(row, index, value), rows and indices being whole numbers", ()) from None

    def _array(self, value: Any, source: RowSource) -> Array:
        found = np.asarray(value) if not isinstance(value, str) else np.zeros((), dtype=object)
        if found.ndim != 1:
            raise self._refused(value, "a row of numbers", (source,))
        if found.dtype == self._kind or not found.size:
            return found.astype(self._kind, copy=False)
        if not self._fits(found):
            raise self._refused(value, f"numbers that {self._kind} holds", (source,))
        return found.astype(self._kind)

    def _fits(self, found: Array) -> bool:
        """Whether the column's type holds all of these numbers of another type."""
        if found.dtype.kind not in ("iubf" if self._kind.kind == "f" else "iub"):
            return False
        if self._kind.kind == "f":
            return not bool((np.isfinite(found) & (np.abs(found) > np.finfo(self._kind).max)).any())
        least, most = (0, 1) if self._kind.kind == "b" else (np.iinfo(self._kind).min, np.iinfo(self._kind).max)
        return bool(found.min() >= least and found.max() <= most)

    def _holds(self, value: Any) -> bool:
        try:
            struct.pack(f"={self._code}", value)
        except _NO_VALUE:
            return False
        return self._code != "?" or _is_truth(value)

    def _refused(self, value: Any, expected: str, sources: Many[RowSource], place: int = 0) -> DeclarationError:
        of = f" of the request {sources[place].sequence.request.id!r}" if sources else ""
        return DeclarationError(
            f"column {self._column.name!r}: its value{of} is {shown(value)}. Expected {expected}. Check its source."
        )

    def _no_place(self, index: int) -> DeclarationError:
        return DeclarationError(
            f"column {self._column.name!r} is {self.width} wide and has no place {index}. Check its value."
        )


def _is_truth(value: object) -> bool:
    """Python's `struct` takes anything for a bool, texts too."""
    return isinstance(value, bool | int | np.bool_) and value in (0, 1)
