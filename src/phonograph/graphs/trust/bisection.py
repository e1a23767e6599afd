"""Bisection: the first segment of a recording that gives other bits than the eager run of the same batch.

The recording runs up to one boundary after the other, and so does the body, eagerly, from the same state. What is there
is compared: the state, what the graphs give to a gap, what the gap gives back, and at the end the outputs. Memory that
nobody has written tells nothing: the body runs twice, with different numbers in it, and what differs then is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.devices.trace import OpWatch, is_users, tensors_in, uncompiled
from phonograph.errors import Frame
from phonograph.graphs.inputs.tree import leaves, reachable
from phonograph.graphs.phases.context import unbroken
from phonograph.graphs.phases.decisions import Replay, ShapeKey
from phonograph.graphs.phases.live_arguments import shown
from phonograph.graphs.recording.backends import RecordedGap
from phonograph.graphs.recording.backends.base import ReplayStep
from phonograph.graphs.recording.tensor_state import generators_restored
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.comparison import described, mismatch, same_bits
from phonograph.graphs.trust.shadow import StatePart, run_eagerly

Noted = dict[str, torch.Tensor]
_NUMBERS = (-191.0, 223.0)


@dataclass(frozen=True)
class Bisected:
    """The first difference between replay and eager run."""

    gaps: Sequence[RecordedGap]
    boundary: int | None
    """How many graphs and gaps have run when the first difference is seen, less one; None where there is none."""
    detail: str = ""
    unwritten: str = ""
    """What the eager run itself takes from memory that nobody has written, if anything."""

    @property
    def num_segments(self) -> int:
        return len(self.gaps) + 1

    @property
    def segment(self) -> int | None:
        """From 1, the first segment that differs; None where none does, or a gap is the first."""
        return None if self.boundary is None or self.boundary % 2 else self.boundary // 2 + 1

    def __str__(self) -> str:
        if self.boundary is None:
            if self.unwritten:
                return f"the eager run reads memory that nobody has written: {self.unwritten}, from one run to the next"
            each = "its one segment does not differ" if not self.gaps else f"none of its {self.num_segments} segments"
            each += " differs when they run one by one" if self.gaps else " when it runs alone"
            return f"{each}: the fault comes and goes, or it is not in the recording but after it"
        number = self.boundary // 2
        if self.boundary % 2:
            gap = f"gap {number + 1} of {len(self.gaps)} ({self._said(number)})"
            return f"{gap} is the first to differ, between segments {number + 1} and {number + 2}: {self.detail}"
        between = [f"after gap {number} ({self._said(number - 1)})"] if number else []
        between += [f"before gap {number + 1} ({self._said(number)})"] if number < len(self.gaps) else []
        where = f", {' and '.join(between)}" if between else ""
        return f"segment {number + 1} of {self.num_segments} is the first to differ{where}: {self.detail}"

    def _said(self, number: int) -> str:
        return described_gap(self.gaps[number])


def bisect(runner: Runner, batch: Any, state: Sequence[StatePart]) -> Bisected:
    """Find the first segment whose results differ; the batch must be one that a recording serves. State is put back.

    What goes past a gap without being given to it is seen in the first segment that uses it.
    """
    decision = runner.decide(batch)
    assert isinstance(decision, Replay)
    probe = _Probe(runner, decision.key, batch, state)
    try:
        return probe.search()
    finally:
        probe.put_back()


class _Stop(BaseException):
    """Ends a run at its boundary; no body catches it by mistake."""


class _Probe:
    """Runs one batch up to any boundary: after boundary 2 i segment i + 1 has run, after 2 i + 1 also its gap."""

    def __init__(self, runner: Runner, key: ShapeKey, batch: Any, state: Sequence[StatePart]) -> None:
        self._runner, self._key, self._batch, self._state = runner, key, batch, state
        self._recording = runner.recording(key)
        self._before = [part.read() for part in state]

    def put_back(self) -> None:
        """The state is what it was."""
        for part, values in zip(self._state, self._before, strict=True):
            part.write(values)

    def search(self) -> Bisected:
        gaps, unwritten = self._recording.gaps, ""
        for boundary in range(2 * len(gaps) + 1):
            found = self._replayed(boundary)
            wanted, again = (self._eager(boundary, number) for number in _NUMBERS)
            for name, value in found.items():
                detail = _apart(value, wanted.get(name), again.get(name))
                if detail:
                    return Bisected(gaps, boundary, f"{name} {detail}, eagerly")
            if boundary == 2 * len(gaps):
                words = ((name, mismatch_of_bits(value, again.get(name))) for name, value in wanted.items())
                unwritten = next((f"{name} {said}" for name, said in words if said), "")
        return Bisected(gaps, None, unwritten=unwritten)

    def _replayed(self, boundary: int) -> Noted:
        """By the runner itself, so that the batch is loaded as in service."""
        noted: Noted = {}

        def replay(steps: Sequence[ReplayStep]) -> None:
            for step in steps[: boundary + 1]:
                step()
            noted.update(self._noted_replay(boundary))
            raise _Stop

        self.put_back()
        with generators_restored(self._runner.device), self._recording.replaying(replay), suppress(_Stop):
            self._runner.run(self._batch)
        return noted

    def _noted_replay(self, boundary: int) -> Noted:
        gaps, runner = self._recording.gaps, self._runner
        if boundary == 2 * len(gaps):
            used = runner.registry.measure(self._batch, {})
            return _outputs(runner, runner.trimmed(self._key, used)) | self._noted_state()
        gap = gaps[boundary // 2]
        given = _given(gap.function, *gap.arguments(), runner.memory.owns)
        return given | (returned(gap.outputs) if boundary % 2 else {}) | self._noted_state()

    def _eager(self, boundary: int, number: float) -> Noted:
        has_gaps = self._recording.has_gaps
        stopping = _StoppingGaps(boundary, self._noted_state) if has_gaps else None
        self.put_back()
        with generators_restored(self._runner.device), unwritten_memory_holds(number):
            try:
                outputs = run_eagerly(self._runner, self._key, self._batch, stopping, with_tail=False)
            except _Stop:
                return stopping.noted if stopping is not None else {}
        return _outputs(self._runner, outputs) | self._noted_state()

    def _noted_state(self) -> Noted:
        return {f"{part.name} after it": part.read() for part in self._state}


class _StoppingGaps:
    """Calls gaps as a replay does, and ends the run at a boundary."""

    def __init__(self, boundary: int, state: Callable[[], Noted]) -> None:
        self._boundary, self._state = boundary, state
        self._num_met = 0
        self.noted: Noted = {}

    def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self._num_met = self._num_met, self._num_met + 1
        given, named = shown((args, kwargs))
        if self._boundary == 2 * number:
            self.noted = _given(function, given, named) | self._state()
            raise _Stop
        with unbroken():
            result = function(*given, **named)
        if self._boundary == 2 * number + 1:
            self.noted = _given(function, given, named) | returned(result) | self._state()
            raise _Stop
        return result


def described_gap(gap: RecordedGap) -> str:
    """`GapAttention.attend, layer=1, gaps.py:58`, and the user's line that calls it."""
    inner = inspect.unwrap(gap.function)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    plain = [f"{name}={value!r}" for name, value in _by_name(gap.function, *gap.arguments()) if _is_plain(value)]
    places = [_place(code.co_filename, code.co_firstlineno)] if code is not None else []
    if gap.called is not None and (code is None or is_users(code.co_filename)):
        places.append(f"called at {_place(gap.called.file, gap.called.line)}")
    return ", ".join([gap.name, *plain, *places])


def mismatch_of_bits(found: torch.Tensor, wanted: torch.Tensor | None) -> str:
    """How two results differ bitwise, in words; empty where they don't."""
    return _apart(found, wanted, wanted)


def _apart(found: torch.Tensor, wanted: torch.Tensor | None, again: torch.Tensor | None) -> str:
    """How a value differs from the eager one where both eager runs agree; empty where it does not."""
    if wanted is None or again is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return mismatch(found, wanted) if wanted is not None else "is not there"
    wrong = ~same_bits(found, wanted) & same_bits(wanted, again)
    return described(found, wanted, wrong) if bool(wrong.any()) else ""


def _given(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_looked_at: Callable[[torch.Tensor], bool] = lambda tensor: True,
) -> Noted:
    """Copies of what a gap is given; what is the same memory in every run need not be looked at."""
    found: Noted = {}
    for name, value in _by_name(function, args, kwargs):
        for path, part in reachable(value):
            if isinstance(part, torch.Tensor) and is_looked_at(part):
                found[f"argument {name}{path}"] = part.clone()
    return found


def returned(result: Any) -> Noted:
    """Copies of what a gap gives back."""
    parts = ((path, part) for path, part in leaves(result) if isinstance(part, torch.Tensor))
    return {f"its result {path}".rstrip(): part.clone() for path, part in parts}


def _outputs(runner: Runner, outputs: Any) -> Noted:
    parts = runner.parts(outputs).items()
    return {f"output {path or '(the only one)'}": value for path, value in parts if isinstance(value, torch.Tensor)}


def _by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        yield from inspect.signature(function).bind(*args, **kwargs).arguments.items()
    except (TypeError, ValueError):
        yield from ((str(index), value) for index, value in enumerate(args))
        yield from kwargs.items()


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _place(file: str, line: int) -> str:
    return str(Frame(file, line, "")).partition(",")[0]


@contextmanager
def unwritten_memory_holds(number: float) -> Iterator[None]:
    """Inside, memory that an op allocates and leaves as it is has this number in it."""

    def on_op(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__.removeprefix("new_").startswith("empty"):
            for tensor in tensors_in(result):
                _fill(tensor, number)
        return result

    with uncompiled(), OpWatch(on_op):
        yield


def _fill(tensor: torch.Tensor, number: float) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(number)
    else:
        tensor.fill_(number > 0)  # small, as it may be an index
