"""TableUpdates: what the host changes in the request tables before a step, as plain data made from the step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.engine.state.column import Array, Column, Form, Group, RowSource, TableSizes, Writer
from phonograph.engine.state.packing import Packing, packed_rows
from phonograph.sizes import next_power_of_two, round_up

ALIGNMENT = 16
_SMALLEST = 256
_ZEROS = bytes(ALIGNMENT)
_NO_BYTES = np.zeros(0, dtype=np.uint8)

WriteForm = Literal["rows", "pairs", "reset"]


class Write(NamedTuple):
    """One write to some columns of a group, and where its bytes lie in the block: equal ones are the same copies on the
    device, whatever the bytes are."""

    group: str
    columns: tuple[str, ...]
    form: WriteForm
    """Rows of one column, or of several that lie together, one after the other; (place, value) pairs of one, whose rows
    lie one after the other: place = row · width + index; or rows of any that get their defaults."""
    num: int
    """Rows, none of them twice, or pairs, no place with two values."""
    indices: int
    """The first byte of rows or places: int64."""
    values: int = 0
    """The first byte of the values, in the columns' types."""


@dataclass(frozen=True)
class TableUpdates:
    """All that the host changes before a step: writes, in order, and the one block of bytes that they read."""

    entered: tuple[int, ...]
    """Rows that have a new owner."""
    asking: Mapping[str, tuple[int, ...]]
    """Group that only some sequences ask for → the rows of it that are written."""
    writes: tuple[Write, ...] = ()
    block: Array = field(default_factory=lambda: _NO_BYTES)


class Block:
    """Bytes that go over in one transfer, each part aligned for every type."""

    def __init__(self, first: bytes = b"") -> None:
        self._parts = [first]
        self._end = len(first)

    def add(self, part: bytes) -> int:
        """Append a part; returns where it begins."""
        start, num_bytes = self._end, len(part)
        self._parts.append(part)
        if num_bytes % ALIGNMENT:
            self._parts.append(_ZEROS[num_bytes % ALIGNMENT :])
            num_bytes = round_up(num_bytes, ALIGNMENT)
        self._end = start + num_bytes
        return start

    def add_rows(self, rows: Many[int]) -> int:
        """Append the numbers of rows."""
        return self.add(packed_rows(rows))

    def packed(self) -> Array:
        """All parts, and at the end an eighth more at most, so that few layouts serve all sizes."""
        num_bytes = _SMALLEST if self._end <= _SMALLEST else round_up(self._end, next_power_of_two(self._end) // 8)
        return np.frombuffer(b"".join(self._parts).ljust(num_bytes, b"\0"), dtype=np.uint8)


def lying_together(columns: Many[Column]) -> list[tuple[Column, ...]]:
    """Of a group, the columns that every entry writes, by the size of an item: one copy writes all of a size."""
    found: dict[int, list[Column]] = {}
    for column in columns:
        if column.width == 1 and column.form == Form.ROW and Writer.ENTRY in column.writer:
            found.setdefault(column.dtype.itemsize, []).append(column)
    return [tuple(together) for together in found.values()]


@dataclass(frozen=True)
class _Sent:
    """What one writer sends of a group."""

    resets: tuple[str, ...]
    """Columns whose rows are reset first."""
    rows: list[tuple[tuple[str, ...], tuple[Column, ...]]]
    """Columns that are sent together, or one alone, with their names."""
    pairs: list[Column]

    @staticmethod
    def at_entry(columns: Many[Column]) -> _Sent:
        """By a sequence that takes its row."""
        together = lying_together(columns)
        own = [one for one in columns if Writer.ENTRY in one.writer and one not in {*chain(*together)}]
        resets = tuple(one.name for one in columns if Form.RESET in one.form)
        return _Sent(resets, _named([*together, *_in_rows(own)]), _in_pairs(own))

    @staticmethod
    def every_step(columns: Many[Column]) -> _Sent:
        """By a sequence that has something new in every step."""
        own = [one for one in columns if Writer.STEP in one.writer and one.value is not None]
        return _Sent((), _named(_in_rows(own)), _in_pairs(own))

    def __bool__(self) -> bool:
        return bool(self.resets or self.rows or self.pairs)


def _named(parts: Many[tuple[Column, ...]]) -> list[tuple[tuple[str, ...], tuple[Column, ...]]]:
    return [(tuple(column.name for column in columns), columns) for columns in parts]


def _in_rows(columns: Many[Column]) -> list[tuple[Column, ...]]:
    return [(column,) for column in columns if Form.ROW in column.form]


def _in_pairs(columns: Many[Column]) -> list[Column]:
    return [column for column in columns if Form.PAIRS in column.form]


class _Draft:
    """Updates in the making."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.asking: dict[str, tuple[int, ...]] = {}
        self.block = Block()

    def write(
        self, group: Group, columns: tuple[str, ...], form: WriteForm, num: int, indices: int, values: bytes = b""
    ) -> None:
        """Append a write; its indices are in the block already."""
        self.writes.append(Write(group.name, columns, form, num, indices, self.block.add(values) if values else 0))

    def done(self, entries: Many[RowSource]) -> TableUpdates:
        """The updates before a step in which these sequences enter."""
        rows = tuple([entry.sequence.row for entry in entries])
        return TableUpdates(rows, self.asking, tuple(self.writes), self.block.packed())


class UpdateBuilder:
    """Makes the updates of steps; while the same sequences decode and nothing is to be said, there are none."""

    def __init__(self, columns: Many[Column], sizes: TableSizes) -> None:
        self._packings = {column.name: Packing(column, sizes) for column in columns if column.is_sent}
        self._changing = [column for column in columns if column.changes is not None]
        self._restored = [column for column in columns if column.restored is not None]
        groups = {one.group: [column for column in columns if column.group == one.group] for one in columns}
        self._at_entry = {group: sent for group, own in groups.items() if (sent := _Sent.at_entry(own))}
        self._every_step = {group: sent for group, own in groups.items() if (sent := _Sent.every_step(own))}
        self._decodes: tuple[Sequence, ...] | None = None
        self._told: dict[str, list[Sequence]] = {}
        """Of these decodes, whoever has something new in every step."""

    def build(self, step: ScheduledStep) -> TableUpdates | None:
        """The updates that go before a step, if there are any."""
        if step.decodes is not self._decodes:
            self._decodes = step.decodes
            self._told = {group.name: told for group in self._every_step if (told := _asking(group, step.decodes))}
        changes = [(column, listed) for column in self._changing if (listed := column.changes(step))]  # type: ignore[misc]
        if not step.prefills and not changes and not self._told:
            return None
        draft, entries = _Draft(), [RowSource(chunk.sequence, chunk.start) for chunk in step.prefills if chunk.enters]
        self._enter(draft, entries)
        self._tell(draft, step)
        for column, listed in changes:
            self._change(draft, column, listed)
        return draft.done(entries) if entries or draft.writes else None

    def undone(self, step: ScheduledStep) -> TableUpdates:
        """The rows of a step as they were before it, as if their sequences entered with what they have by then."""
        entries = [RowSource(sequence, sequence.num_computed - step.tokens_per_row) for sequence in step.decodes]
        entries += [RowSource(chunk.sequence, chunk.start) for chunk in step.prefills]
        sequences = [entry.sequence for entry in entries]
        pages = tuple((seq.row, index, page) for seq in sequences for index, page in enumerate(seq.pages))
        listed = replace(step, decodes=(), prefills=(), page_updates=pages)
        draft, known = _Draft(), [entry for entry in entries if entry.start < len(entry.sequence.known())]
        self._enter(draft, entries)
        for column in self._changing:
            assert column.changes is not None
            self._change(draft, column, column.changes(listed))
        for column in self._restored if known else ():
            assert column.restored is not None
            rows = draft.block.add_rows([entry.sequence.row for entry in known])
            values = self._packings[column.name].numbers([column.restored(entry) for entry in known], known)
            draft.write(column.group, (column.name,), "rows", len(known), rows, values)
        return draft.done(entries)

    def _enter(self, draft: _Draft, entries: Many[RowSource]) -> None:
        for group, sent in self._at_entry.items():
            asked = group.asked
            asking = entries if asked is None else [entry for entry in entries if asked(entry.sequence)]
            if asking:
                self._send(draft, group, sent, asking)

    def _tell(self, draft: _Draft, step: ScheduledStep) -> None:
        ending = step.sampling[len(step.decodes) :]
        for group, sent in self._every_step.items():
            sequences = self._told.get(group.name, []) + _asking(group, ending)
            if sequences:
                self._send(draft, group, sent, [RowSource(one, one.num_computed) for one in sequences])

    def _send(self, draft: _Draft, group: Group, sent: _Sent, entries: Many[RowSource]) -> None:
        """What a writer sends of a group for these sequences."""
        num, rows = len(entries), [entry.sequence.row for entry in entries]
        begin = draft.block.add_rows(rows)
        if group.asked is not None:
            draft.asking[group.name] = (*draft.asking.get(group.name, ()), *rows)
        if sent.resets:
            draft.write(group, sent.resets, "reset", num, begin)
        for names, columns in sent.rows:
            values = b"".join([self._rows(column, entries) for column in columns])
            draft.write(group, names, "rows", num, begin, values)
        for column in sent.pairs:
            self._pairs(draft, column, entries)

    def _pairs(self, draft: _Draft, column: Column, entries: Many[RowSource]) -> None:
        """Pairs of each sequence: as many as a prompt has tokens, or none."""
        assert column.value is not None
        packing = self._packings[column.name]
        found = [pairs for entry in entries if (pairs := packing.pairs(column.value(entry), entry)) is not None]
        if found:
            num = sum([len(places) for places, _ in found])
            begin = draft.block.add(b"".join([places.tobytes() for places, _ in found]))
            draft.write(column.group, (column.name,), "pairs", num, begin, b"".join([values for _, values in found]))

    def _change(self, draft: _Draft, column: Column, changes: Many[tuple[int, int, Any]]) -> None:
        """Pairs that the step lists itself."""
        if changes:
            places, values = self._packings[column.name].changes(changes)
            draft.write(column.group, (column.name,), "pairs", len(changes), draft.block.add(places), values)

    def _rows(self, column: Column, entries: Many[RowSource]) -> bytes:
        """The values of one column, as bytes."""
        assert column.value is not None
        found, packing = [column.value(entry) for entry in entries], self._packings[column.name]
        return packing.numbers(found, entries) if column.width == 1 else packing.rows(found, entries)


def _asking(group: Group, sequences: Many[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if group.asked is None or group.asked(sequence)]
