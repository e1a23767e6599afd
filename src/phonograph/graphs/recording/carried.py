"""Carried fields: what a recorded body read of its batch besides slots. A recording keeps the values of its sample, so
that a batch with other ones must not be served by it.

Reads are noted while the body is recorded: a field that only a tail, a gap, a host plan or a computed slot looks at in
the live batch is not frozen, and may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from phonograph.devices.trace import user_frame
from phonograph.errors import Frame
from phonograph.graphs.inputs.fields import Path, path_of
from phonograph.graphs.inputs.snapshots import snapshot, snapshots_without
from phonograph.graphs.inputs.tree import attributes, put_attribute
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.phase import Phase, Sample

ABSENT = snapshot(None)
"""A field that is not there is taken for None."""


class Carried(dict[str, Any]):
    """Snapshots of fields by name, and the line of the body that reads each, where one is known."""

    def __init__(self, taken: Mapping[str, Any], lines: Mapping[str, Frame]) -> None:
        super().__init__(taken)
        self.lines = lines


class FieldReads:
    """Notes which fields of a batch a body reads."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._all = False
        self.lines: dict[str, Frame] = {}
        """By field, the user's line that reads it first."""

    def noting(self, batch: Any) -> Any:
        """A copy that notes what is read of it; where none can be made the batch itself, all of it counted as read."""
        if type(batch) is dict:
            return _NotingDict(batch, self._note)
        made = _noting_object(batch, self._note)
        self._all = self._all or made is None
        return batch if made is None else made

    def of(self, batch: Any) -> set[str]:
        """The names that were read; those of a batch that has no such field among them."""
        return self._names | (fields_by_name(batch).keys() if self._all else set())

    def _note(self, name: str | None) -> None:
        """One field, or with None all of them."""
        if name is None:
            self._all = True
        else:
            self._names.add(name)
            line = user_frame() if name not in self.lines else None
            if line is not None:
                self.lines[name] = line


def fields_by_name(batch: Any) -> Mapping[str, Any]:
    """What a batch holds itself."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        named: Mapping[str, Any] = batch._asdict()
        return named
    held = getattr(batch, "__dict__", None)
    return held if held is not None else {str(name): value for name, value in attributes(batch)}


def carried_by(phase: Phase, key: ShapeKey, sample: Sample, reads: FieldReads) -> Carried:
    """Snapshots of what was read, and of keyword arguments, by name; without slots, and without what may change."""
    left_out = left_out_of(phase)
    fields = fields_by_name(sample.batch)
    if phase.compares_others:
        return Carried(snapshots_without(fields, left_out), {})
    decided = _decided_by_axes(phase, key, sample.batch)
    taken = {name: fields.get(name) for name in reads.of(sample.batch) if name not in decided}
    return Carried(snapshots_without({**taken, **sample.kwargs}, left_out), reads.lines)


def changed_field(
    carried: Mapping[str, Any], batch: Any, kwargs: Mapping[str, Any], left_out: Collection[Path]
) -> str | None:
    """A field whose value is not the one that was recorded."""
    fields = fields_by_name(batch)
    for name, taken in carried.items():
        found = snapshots_without({name: kwargs[name] if name in kwargs else fields.get(name)}, left_out)
        if found.get(name, ABSENT) != taken:
            return name
    return None


def left_out_of(phase: Phase) -> set[Path]:
    """What is loaded for every batch, is not held by recordings, or may differ."""
    sizes = {path_of(dim.field) for dim in phase.all_dims.values() if dim.field is not None}
    return {slot.path for slot in phase.slots} | {one.path for one in phase.live} | {*map(path_of, phase.free)} | sizes


def _decided_by_axes(phase: Phase, key: ShapeKey, batch: Any) -> set[str]:
    """Fields that the axes' values are in: they pick the recording, or one that stands in."""
    before = {name: snapshot(value) for name, value in fields_by_name(batch).items()}
    found = set[str]()
    for axis in phase.axes:
        for value in axis.values:
            after = fields_by_name(axis.apply(batch, value))
            found |= {name for name in after if snapshot(after[name]) != before.get(name, ABSENT)}
    return found


class _NotingDict(dict[Any, Any]):
    """A batch that is a dict; with its own `__iter__`, `**` and dict() go through `keys` and `__getitem__`."""

    def __init__(self, fields: Mapping[Any, Any], note: Callable[[str | None], None]) -> None:
        super().__init__(fields)
        self._note = note

    def __getitem__(self, name: Any) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def pop(self, name: Any, *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)

    def setdefault(self, name: Any, default: Any = None) -> Any:
        self._note(name)
        return super().setdefault(name, default)

    def __iter__(self) -> Iterator[Any]:
        self._note(None)
        return super().__iter__()

    def keys(self) -> Any:
        self._note(None)
        return super().keys()

    def values(self) -> Any:
        self._note(None)
        return super().values()

    def items(self) -> Any:
        self._note(None)
        return super().items()

    def copy(self) -> Any:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


def _noting_object(batch: Any, note: Callable[[str | None], None]) -> Any:
    """A copy that runs no code of the batch's class; None where that can't be."""
    kind: Any = type(batch)
    if isinstance(batch, Mapping) or hasattr(kind, "__copy__"):
        return None
    if isinstance(batch, tuple) and hasattr(kind, "_fields"):
        return tuple.__new__(_noting_kind(kind, note), tuple.__iter__(batch))
    base = next((one for one in (object, SimpleNamespace) if kind.__new__ is one.__new__), None)
    if base is None:
        return None
    made: Any = base.__new__(_noting_kind(kind, note))
    for name, value in attributes(batch):
        put_attribute(made, str(name), value)
    return made


def _noting_kind(kind: Any, note: Callable[[str | None], None]) -> Any:
    """A class like another, of objects that note which attributes are read, be they fields or methods."""

    def read(self: Any, name: str) -> Any:
        if name == "__dict__":
            note(None)
        elif not name.startswith("__"):
            note(name)
        return kind.__getattribute__(self, name)

    def iterate(self: Any) -> Iterator[Any]:
        note(None)
        return tuple.__iter__(self)

    def item(self: Any, place: Any) -> Any:
        note(None)
        return tuple.__getitem__(self, place)

    added: dict[str, Any] = {"__getattribute__": read, "__module__": kind.__module__, "__slots__": ()}
    if issubclass(kind, tuple):
        added |= {"__iter__": iterate, "__getitem__": item}
    return type(kind.__name__, (kind,), added)
