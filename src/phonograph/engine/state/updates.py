"""TableUpdates: what the host changes in the request tables before a step, as plain data made from the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.engine.state.column import Array, Column, Form, Group, RowSource, TableSizes, Writer
from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.values import numpy_dtype

Pairs = tuple[Array, Array]
"""Places in a column whose rows lie one after the other (row · width + index), and what is written there."""


@dataclass(frozen=True)
class Write:
    """New values for some rows of one group."""

    group: str
    rows: Array
    """int64, none of them twice."""
    values: Mapping[str, Array]
    """Column → a number or a row for each of the rows."""
    pairs: Mapping[str, Pairs]


@dataclass(frozen=True)
class TableUpdates:
    """All that the host changes before a step."""

    entered: tuple[int, ...]
    """Rows that have a new owner."""
    writes: tuple[Write, ...]


class UpdateBuilder:
    """Makes the updates of steps; while the same sequences decode and nothing is to be said, there are none."""

    def __init__(self, columns: Many[Column], sizes: TableSizes) -> None:
        self._sizes = sizes
        self._changing = [column for column in columns if column.changes is not None]
        self._restored = [column for column in columns if column.restored is not None]
        self._at_entry = _by_group(columns, Writer.ENTRY)
        self._every_step = _by_group(columns, Writer.STEP)
        self._decodes: tuple[Sequence, ...] | None = None
        self._told: dict[Group, list[Sequence]] = {}
        """Of these decodes, whoever has something new in every step."""

    def build(self, step: ScheduledStep) -> TableUpdates | None:
        """The updates that go before a step, if there are any."""
        if step.decodes is not self._decodes:
            self._decodes = step.decodes
            self._told = {group: told for group in self._every_step if (told := _asking(group, step.decodes))}
        changes = [(column, listed) for column in self._changing if (listed := column.changes(step))]  # type: ignore[misc]
        if not step.prefills and not changes and not self._told:
            return None
        entries = [RowSource(chunk.sequence, chunk.start) for chunk in step.new_rows]
        writes = [*self._entered(entries), *self._stepped(step), *(self._changed(*change) for change in changes)]
        if not entries and not writes:
            return None
        return TableUpdates(tuple(entry.sequence.row for entry in entries), tuple(writes))

    def undone(self, step: ScheduledStep) -> TableUpdates:
        """The rows of a step as they were before it, as if their sequences entered with what they have by then."""
        entries = [RowSource(sequence, sequence.num_computed - step.tokens_per_row) for sequence in step.decodes]
        entries += [RowSource(chunk.sequence, chunk.start) for chunk in step.prefills]
        sequences = [entry.sequence for entry in entries]
        pages = tuple((seq.row, index, page) for seq in sequences for index, page in enumerate(seq.pages))
        listed = replace(step, decodes=(), prefills=(), page_updates=pages)
        changes = [(column, column.changes(listed)) for column in self._changing]  # type: ignore[misc]
        known = [entry for entry in entries if entry.start < len(entry.sequence.known())]
        writes = [*self._entered(entries), *(self._changed(*change) for change in changes if change[1])]
        writes += [self._write_one(column, known) for column in self._restored if known]
        return TableUpdates(tuple(sequence.row for sequence in sequences), tuple(writes))

    def _write_one(self, column: Column, entries: Many[RowSource]) -> Write:
        assert column.restored is not None
        rows = np.fromiter((entry.sequence.row for entry in entries), dtype=np.int64, count=len(entries))
        values = np.asarray([column.restored(entry) for entry in entries], dtype=numpy_dtype(column.dtype))
        return Write(column.group.name, rows, {column.name: values}, {})

    def _entered(self, entries: Many[RowSource]) -> Iterator[Write]:
        for group, columns in self._at_entry.items():
            asked = group.asked
            asking = entries if asked is None else [entry for entry in entries if asked(entry.sequence)]
            if asking:
                yield self._write(group, columns, asking)

    def _stepped(self, step: ScheduledStep) -> Iterator[Write]:
        ending = step.sampling[len(step.decodes) :]
        for group, columns in self._every_step.items():
            sequences = self._told.get(group, []) + _asking(group, ending)
            if sequences:
                yield self._write(
                    group, columns, [RowSource(sequence, sequence.num_computed) for sequence in sequences]
                )

    def _changed(self, column: Column, changes: Many[tuple[int, int, Any]]) -> Write:
        rows, indices, values = zip(*changes, strict=True)
        places = self._places(column, np.asarray(rows, dtype=np.int64), np.asarray(indices, dtype=np.int64))
        pairs = {column.name: (places, np.asarray(values, dtype=numpy_dtype(column.dtype)))}
        return Write(column.group.name, np.zeros(0, dtype=np.int64), {}, pairs)

    def _write(self, group: Group, columns: Many[Column], entries: Many[RowSource]) -> Write:
        rows = np.fromiter((entry.sequence.row for entry in entries), dtype=np.int64, count=len(entries))
        values = {column.name: self._rows(column, entries) for column in columns if Form.ROW in column.form}
        pairs = {column.name: self._pairs(column, entries, rows) for column in columns if Form.PAIRS in column.form}
        return Write(group.name, rows, values, pairs)

    def _rows(self, column: Column, entries: Many[RowSource]) -> Array:
        assert column.value is not None
        kind, found = numpy_dtype(column.dtype), [column.value(entry) for entry in entries]
        if column.width == 1:
            return np.asarray(found, dtype=kind)
        whole = np.zeros((len(entries), self._sizes.width(column.width)), dtype=kind)
        for row, value in zip(whole, found, strict=True):
            # What a tokenizer has beyond the model's vocabulary can't be picked, so nobody looks at its bits.
            count = min(len(value), len(row))
            row[:count] = value[:count]
        return whole

    def _pairs(self, column: Column, entries: Many[RowSource], rows: Array) -> Pairs:
        assert column.value is not None
        found = [column.value(entry) for entry in entries]
        indices = [np.asarray(index, dtype=np.int64) for index, _ in found]
        values = [np.asarray(value, dtype=numpy_dtype(column.dtype)) for _, value in found]
        of_rows = np.repeat(rows, [len(index) for index in indices])
        return self._places(column, of_rows, np.concatenate(indices)), np.concatenate(values)

    def _places(self, column: Column, rows: Array, indices: Array) -> Array:
        width = self._sizes.width(column.width)
        if len(indices) and not 0 <= indices.min() <= indices.max() < width:
            # On the device it would be a place in another sequence's row.
            wrong = next(int(index) for index in indices if not 0 <= index < width)
            raise DeclarationError(f"column {column.name!r} is {width} wide and has no place {wrong}. Check its value.")
        return rows * width + indices


def _by_group(columns: Many[Column], writer: Writer) -> dict[Group, list[Column]]:
    """The columns that this writer fills from sequences."""
    found: dict[Group, list[Column]] = {}
    for column in columns:
        if writer in column.writer and column.value is not None:
            found.setdefault(column.group, []).append(column)
    return found


def _asking(group: Group, sequences: Many[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if group.asked is None or group.asked(sequence)]
