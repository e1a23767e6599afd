"""TwoRuns: two traces of one body, and the first op whose used rows differ though all that it reads is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from phonograph.graphs.trust.comparison import differing
from phonograph.graphs.trust.value_trace import Place, RanOp, Value, ValueTrace

AllowedAt = Callable[[Place, torch.Tensor], Iterator[torch.Tensor | None]]
"""What rounding may move a value of the run without padding by."""


class _Status(Enum):
    """How a value of one run stands to that of the other."""

    SAME = "same"
    DIFFERS = "differs"
    UNKNOWN = "unknown"
    """There is no copy of it, or its form does not say which part of it is used."""


@dataclass(eq=False)
class TwoRuns:
    """Two runs that should agree on used rows."""

    found: ValueTrace
    wanted: ValueTrace
    form: ValueTrace
    """The run without padding: by its shapes, which part of a value is used."""
    sizes: frozenset[tuple[int, int]]
    """Padded and used size of every dim."""
    allowed: AllowedAt | None = None
    """None where the bits must be equal."""
    tolerance: float | None = None
    _known: dict[Place, _Status] = field(default_factory=dict)

    def __post_init__(self) -> None:
        runs = zip(self.found.ops, self.wanted.ops, self.form.ops, strict=False)
        self.num_alike = next((n for n, ops in enumerate(runs) if not _is_one_op(ops)), self._shortest)
        """How many ops, from the first on, the runs have in common."""

    @property
    def _shortest(self) -> int:
        return min(len(self.found.ops), len(self.wanted.ops), len(self.form.ops))

    def origin(self, targets: set[int]) -> RanOp | None:
        """The first op whose used rows differ by its own doing, of those whose differences reach the targets.

        Targets are numbers of memory in the wanted run. Where no op gives them, or the runs part, all ops count.
        """
        ends = [n for n in range(self.num_alike) if {value.memory for value in self.wanted.ops[n].gives} & targets]
        if not ends or self.parted is not None:
            ends = list(range(self.num_alike))
        number = self._first([number for number in ends if self._gives(number) is not _Status.SAME])
        return self.found.ops[number] if number is not None else None

    @property
    def parted(self) -> tuple[RanOp | None, RanOp | None] | None:
        """The ops at which the two runs part; None for a run that is at its end, and where they do not part."""
        if self.found.is_cut_short or self.wanted.is_cut_short:
            return None
        one, other = (run.ops[self.num_alike] if self.num_alike < len(run.ops) else None for run in self._both)
        return (one, other) if one is not None or other is not None else None

    @property
    def _both(self) -> tuple[ValueTrace, ValueTrace]:
        return self.found, self.wanted

    def _first(self, ends: Sequence[int]) -> int | None:
        """Backwards from the ends, along what is not the same."""
        todo, seen = list(ends), set[int]()
        begins = set[int]()
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            before = list(self._sources(number))
            todo += before
            if not before and self._gives(number) is _Status.DIFFERS:
                begins.add(number)
        return min(begins or {number for number in seen if self._gives(number) is _Status.DIFFERS}, default=None)

    def _sources(self, number: int) -> Iterator[int]:
        """The ops before that gave what this one reads and what is not the same."""
        reads = self.wanted.ops[number].reads
        memories = {
            value.memory for index, value in enumerate(reads) if self._status((number, True, index)) is not _Status.SAME
        }
        for before in range(number) if memories else ():
            gives = self.wanted.ops[before].gives
            if memories & {value.memory for value in gives} and self._gives(before) is not _Status.SAME:
                yield before

    def _gives(self, number: int) -> _Status:
        found = {self._status((number, False, index)) for index in range(len(self.wanted.ops[number].gives))}
        return next((one for one in (_Status.DIFFERS, _Status.UNKNOWN) if one in found), _Status.SAME)

    def _status(self, place: Place) -> _Status:
        if place not in self._known:
            self._known[place] = self._compared(place)
        return self._known[place]

    def _compared(self, place: Place) -> _Status:
        found, wanted, form = (_value_at(run, place) for run in (self.found, self.wanted, self.form))
        if found is None or wanted is None or form is None:
            return _Status.UNKNOWN
        one, other = (self._used(value.content, form.shape) for value in (found, wanted))
        if one is None or other is None:
            return _Status.UNKNOWN
        if one.dtype != other.dtype:
            return _Status.DIFFERS
        allowed, tolerance = self.allowed, 0.0 if self.allowed is None else self.tolerance
        room = (lambda value: allowed(place, value)) if allowed is not None else None
        wrong = differing(one, other, tolerance=tolerance, allowed=room)
        return _Status.DIFFERS if bool(wrong.any()) else _Status.SAME

    def _used(self, content: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The part of a value that is used; None where its form does not tell."""
        if content is None or content.dim() != len(shape):
            return None
        for axis, size in enumerate(shape):
            if content.shape[axis] == size:
                continue
            if (content.shape[axis], size) not in self.sizes:
                return None
            content = content.narrow(axis, 0, size)
        return content


def _value_at(run: ValueTrace, place: Place) -> Value | None:
    number, is_read, index = place
    values = run.ops[number].reads if is_read else run.ops[number].gives
    return values[index] if index < len(values) else None


def _is_one_op(ops: Sequence[RanOp]) -> bool:
    return len({(op.name, op.frame) for op in ops}) == 1
