"""Frozen values: what two runs of one shape on different samples do differently, found in their traces.

Only slots may differ between samples. Whatever else differs in the ops of two runs is a value of the host, which a
recording would have frozen: a number among an op's arguments, the number or kind of ops, the memory that one reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from phonograph.devices.op_trace import OpTrace, Outside, TensorNote, TracedOp, described
from phonograph.errors import Frame, HostConstantError

_REMEDY = (
    "Put the value in a slot, mark the function @graph_break and use backend='breakable', or declare an axis, whose "
    "values have recordings of their own"
)
_NOBODYS = "a tensor that is no slot and none of the model's (made in another thread, or of numpy's memory)"
_ONE_MEMORY = "Put the tensor in a slot, or keep one tensor and write to it in place"


@dataclass(frozen=True)
class Difference:
    """The first thing that two runs of one shape do differently."""

    op: str
    frame: Frame | None
    problem: str
    remedy: str = _REMEDY

    def error(self) -> HostConstantError:
        """As the reason why a recording is not made."""
        return HostConstantError(self.problem, self.remedy, op=self.op, frame=self.frame)

    def __str__(self) -> str:
        return str(self.error())


@dataclass(eq=False)
class _Comparison:
    one: OpTrace
    other: OpTrace
    names: Callable[[], Mapping[int, str]]
    """By storage, what the user calls it; asked only where a difference is found."""
    _met: set[int] = field(default_factory=set)

    def first(self) -> Difference | None:
        for ours, theirs in zip_longest(self.one.ops, self.other.ops):
            if ours is None or theirs is None or ours.name != theirs.name:
                return _other_way(ours, theirs)
            found = self._difference(ours, theirs)
            if found is not None:
                return found
        return None

    def _difference(self, ours: TracedOp, theirs: TracedOp) -> Difference | None:
        if [name for name, _ in ours.arguments] != [name for name, _ in theirs.arguments]:
            return _other_way(ours, theirs)
        for (name, one), (_, other) in zip(ours.arguments, theirs.arguments, strict=True):
            problem = self._differs(one, other)
            if problem is not None:
                return problem.of(ours, f"({name}=)")
        for one, other in zip_longest(ours.results, theirs.results):
            if one != other:
                return _Problem(f"puts out {_shown(one)} with one sample and {_shown(other)} with another").of(ours, "")
        return None

    def _differs(self, one: Any, other: Any) -> _Problem | None:
        """What tells two arguments apart, or None."""
        if isinstance(one, TensorNote) and isinstance(other, TensorNote):
            return self._tensors_differ(one, other)
        if type(one) is not type(other):
            return _frozen(one, other)
        if isinstance(one, tuple):
            if len(one) != len(other):
                return _frozen(one, other)
            found = (self._differs(ours, theirs) for ours, theirs in zip(one, other, strict=True))
            return next((problem for problem in found if problem is not None), None)
        return None if one == other or _is_nan(one, other) else _frozen(one, other)

    def _tensors_differ(self, one: TensorNote, other: TensorNote) -> _Problem | None:
        if one.memory == other.memory and one.memory in self.one.outside and one.memory in self.other.outside:
            found = self._memory_differs(one.memory)
            if found is not None:
                return found
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return _Problem(f"gets {one} with one sample and {other} with another, a size that a recording has frozen")
        if one != other:
            problem = f"gets {self._called(one, self.one)} with one sample and {self._called(other, self.other)} with "
            return _Problem(f"{problem}another, and a recording has only one of both", _ONE_MEMORY)
        return None

    def _memory_differs(self, number: int) -> _Problem | None:
        """Whether memory from outside is another; judged once, where it is first met."""
        if number in self._met:
            return None
        self._met.add(number)
        one, other = self.one.outside[number], self.other.outside[number]
        if one.storage._cdata == other.storage._cdata:
            return None
        if one.number is not None and other.number is not None:
            same = one.number == other.number or _is_nan(one.number, other.number)
            return None if same else _frozen(one.number, other.number, self._known(other))
        ours, theirs = self._name(one), self._name(other)
        if ours == theirs:
            problem = f"reads {ours}, which is another tensor in every run, and a recording keeps the first"
        else:
            problem = f"reads {ours} with one sample and {theirs} with another, and a recording has only one of both"
        return _Problem(problem, _ONE_MEMORY)

    def _called(self, note: TensorNote, trace: OpTrace) -> str:
        outside = trace.outside.get(note.memory)
        return self._name(outside) if outside is not None else f"a {note} that the body made"

    def _name(self, outside: Outside) -> str:
        return self._known(outside) or _NOBODYS

    def _known(self, outside: Outside) -> str:
        number = outside.storage._cdata
        return self.one.names.get(number) or self.other.names.get(number) or self.names().get(number) or ""


@dataclass(frozen=True)
class _Problem:
    what: str
    remedy: str = _REMEDY

    def of(self, op: TracedOp, place: str) -> Difference:
        return Difference(op.name, op.frame, f"{op.name}{place} {self.what}", self.remedy)


def find_difference(one: OpTrace, other: OpTrace, names: Callable[[], Mapping[int, str]]) -> Difference | None:
    """What two runs of one shape do differently, or None; `names` calls memory what the user calls it."""
    with torch.no_grad():
        return _Comparison(one, other, names).first()


def _frozen(one: Any, other: Any, name: str = "") -> _Problem:
    values = f"{described(one)} with one sample and {described(other)} with another"
    named = f"{name}: " if name else ""
    return _Problem(f"gets {named}{values}: a value of the host, which a recording would freeze")


def _other_way(ours: TracedOp | None, theirs: TracedOp | None) -> Difference:
    named = ours if ours is not None else theirs
    assert named is not None
    problem = (
        f"the body goes another way with another sample: one runs {_run(ours)}, the other {_run(theirs)}, and a "
        "recording has one way only"
    )
    return Difference(named.name, named.frame, problem)


def _run(op: TracedOp | None) -> str:
    if op is None:
        return "nothing more"
    return f"{op.name} at {op.frame}" if op.frame is not None else op.name


def _shown(note: Any) -> str:
    return "nothing" if note is None else described(note)


def _is_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
