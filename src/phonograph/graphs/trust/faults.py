"""Faults: the op and the line at fault where a check has failed, by runs of the body that are compared op by op.

They are made once a check has failed, so that their cost does not matter much, but there is a bound to it. Where they
tell nothing, or raise, the finding stays without a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.devices.op_trace import calling_frame
from phonograph.devices.trace import raising_frame, watching_ops, written_tensors
from phonograph.errors import Frame
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.inputs.tree import reachable
from phonograph.graphs.trust.bisection import described_gap, unwritten_memory_holds
from phonograph.graphs.trust.comparison import same_bits
from phonograph.graphs.trust.further_runs import gaps_in_a_row, with_none
from phonograph.graphs.trust.rounding import Rounding
from phonograph.graphs.trust.trial import Trial, Way
from phonograph.graphs.trust.two_runs import TwoRuns
from phonograph.graphs.trust.value_trace import RanOp, ValueTrace, memories_of

_PADDED, _UNPADDED = Way(), Way(padded=False)
_NUMBERS = (-191.0, 223.0)
"""In memory that nobody has written; by the pattern of the poison."""


@dataclass
class Looks:
    """How many looks for lines one verify may take, and for how long."""

    num_left: int = 12
    seconds_left: float = 60.0

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Yields whether there is one left."""
        begun, has_one = time.perf_counter(), self.num_left > 0 and self.seconds_left > 0
        self.num_left -= 1
        try:
            yield has_one
        finally:
            self.seconds_left -= time.perf_counter() - begun


@dataclass(frozen=True)
class _Traced:
    """A run with its ops."""

    trace: ValueTrace
    memory: set[int]
    """Of its outputs."""


class Faults:
    """Looks for the lines at fault of one trial. Every answer is a sentence, or nothing."""

    def __init__(self, trial: Trial, looks: Looks, *, tolerance: float | None, is_thorough: bool) -> None:
        self._trial, self._looks = trial, looks
        self._tolerance, self._is_thorough = tolerance, is_thorough
        self._traced: dict[Way, _Traced] = {}
        self._roundings: dict[Way, Rounding] = {}

    def of_padding(self) -> str:
        """Where the outputs with padding differ from those without."""
        return self._said(lambda: self._of_padding(_PADDED, _UNPADDED, set()))

    def of_state(self, *, noisy: bool) -> str:
        """The same for outputs and state, from a start of noise or from what there is."""
        ways = Way(noisy=noisy), Way(padded=False, noisy=noisy)
        return self._said(lambda: self._of_padding(*ways, memories_of(self._trial.elements)))

    def of_poison(self) -> str:
        """Where what unread padding or memory that nobody has written holds gets into used rows."""
        return self._said(self._of_poison)

    def of_draws(self) -> str:
        """The op that draws more random numbers with padding than without."""
        return self._said(self._of_draws)

    def of_write(self, name: str, places: torch.Tensor) -> str:
        """The op that writes these elements of a state where there is padding."""
        return self._said(lambda: self._of_write(name, places))

    def of_none(self, slot: Slot) -> str:
        """Where the value that stands for an absent input makes another difference than None."""
        return self._said(lambda: self._of_none(slot))

    def of_stand_in(self) -> str:
        """Where the body of a recording parts from that of the product that it stands in for."""
        return self._said(self._of_stand_in)

    def of_gaps(self) -> str:
        """The first gap that gives something else after another batch when it is replayed."""
        return self._said(self._of_gaps)

    def raising(self) -> Frame | None:
        """The line of the body that raises on the padded view, where a replay raised."""
        with self._looks.taken() as has_one:
            try:
                if has_one:
                    self._trial.watched(_PADDED)
            except Exception as error:
                return raising_frame(error.__traceback__)
        return None

    def _said(self, look: Callable[[], str]) -> str:
        with self._looks.taken() as has_one:
            try:
                return look() if has_one else ""
            except Exception:  # the check has failed, and that is told
                return ""

    # -- the looks ----------------------------------------------------------------------------------------

    def _of_padding(self, padded: Way, unpadded: Way, state: set[int]) -> str:
        runs = [padded]
        if self._trial.runner.device.capabilities.captures_in_function_mode:
            runs.append(replace(padded, in_function_mode=True))
        wanted = self._run(unpadded)
        for way in runs:
            found = self._run(way)
            pair = self._pair(found.trace, wanted.trace, unpadded)
            words = ("as it is captured", "eagerly") if way.in_function_mode else ("with padding", "without")
            said = _told(pair, pair.origin(wanted.memory | state), *words)
            if said:
                return said
        return self._of_poison()

    def _of_poison(self) -> str:
        first, second = (self._run(Way(pattern=pattern)) for pattern in (0, 1))
        form = self._run(_UNPADDED).trace if self._trial.extent.is_padded else second.trace
        origin = TwoRuns(first.trace, second.trace, form, self._sizes).origin(second.memory)
        return _begins(origin) if origin is not None else ""

    def _of_draws(self) -> str:
        wanted = self._run(_UNPADDED).trace.ops
        if not self._trial.extent.is_padded:
            frozen = next((op for op in wanted if op.draws), None)
            return f"Drawn by {frozen}" if frozen is not None and frozen.frame is not None else ""
        for one, other in zip(self._run(_PADDED).trace.ops, wanted, strict=False):
            if one.draws and [value.shape for value in one.gives] != [value.shape for value in other.gives]:
                return f"Drawn by {one}" if one.frame is not None else ""
        return ""

    def _of_write(self, name: str, places: torch.Tensor) -> str:
        memory = self._trial.elements[name]
        storage = memory.untyped_storage()._cdata
        lines: list[str] = []
        held: list[torch.Tensor] = []

        def writes(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
            return any(one.untyped_storage()._cdata == storage for one in written_tensors(func, args, kwargs))

        def before(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            held[:] = [memory.clone()] if not lines and writes(func, args, kwargs) else []

        def after(func: Any, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
            if held and bool((~same_bits(memory, held[0]) & places).any()):
                frame = calling_frame()
                lines.append(f"It is written by {str(func).removesuffix('.default')} ({frame})" if frame else "")

        self._trial.watched(Way(noisy=self._trial.makes_noise), watching_ops(before, after))
        return lines[0] if lines else ""

    def _of_none(self, slot: Slot) -> str:
        wanted = ValueTrace()
        with_none(self._trial, slot, _tracing(wanted, _NUMBERS[1]))
        found = self._run(_UNPADDED)
        pair = TwoRuns(found.trace, wanted, wanted, frozenset(), self._rounding(_UNPADDED).allowed, self._tolerance)
        return _told(pair, pair.origin(found.memory), f"with {slot.absent}", "with None")

    def _of_stand_in(self) -> str:
        trial, found = self._trial, ValueTrace()
        recorded = trial.runner.phase.sample_for(trial.key, trial.unpadded, trial.seed)
        trial.reach(recorded)
        trial.watched(_PADDED, _tracing(found, _NUMBERS[1]), recorded)
        wanted = self._run(_PADDED)
        pair = TwoRuns(found, wanted.trace, wanted.trace, frozenset())
        return _told(pair, pair.origin(wanted.memory), f"in {trial.key}", f"in {trial.served}")

    def _of_gaps(self) -> str:
        trial = self._trial
        replayed, eager = gaps_in_a_row(trial, Way(replay=True)), gaps_in_a_row(trial, _PADDED)
        for gap, one, other in zip(trial.runner.recording(trial.key).gaps, replayed, eager, strict=False):
            if any(name not in other or not torch.equal(value, other[name]) for name, value in one.items()):
                return f"It begins in the gap {described_gap(gap)}"
        return ""

    # -- runs ---------------------------------------------------------------------------------------------

    def _run(self, way: Way) -> _Traced:
        if way not in self._traced:
            traced = _Traced(ValueTrace(), set())
            with self._noting_outputs(traced.memory):
                self._trial.watched(way, _tracing(traced.trace, _NUMBERS[way.pattern]))
            self._traced[way] = traced
        return self._traced[way]

    @contextmanager
    def _noting_outputs(self, memory: set[int]) -> Iterator[None]:
        trial, before = self._trial, self._trial.on_return
        trial.on_return = lambda outputs: memory.update(memories_of(dict(reachable(outputs))))
        try:
            yield
        finally:
            trial.on_return = before

    def _pair(self, found: ValueTrace, wanted: ValueTrace, way: Way) -> TwoRuns:
        return TwoRuns(found, wanted, wanted, self._sizes, self._rounding(way).allowed, self._tolerance)

    @property
    def _sizes(self) -> frozenset[tuple[int, int]]:
        extent = self._trial.extent
        return frozenset((padded, extent.used[name]) for name, padded in extent.padded.items())

    def _rounding(self, way: Way) -> Rounding:
        """What rounding may move every value of a run by."""

        def run(around: AbstractContextManager[None]) -> dict[Any, Any]:
            trace = ValueTrace()
            self._trial.watched(way, _tracing(trace, _NUMBERS[way.pattern], around))
            return dict(trace.values())

        if way not in self._roundings:
            self._roundings[way] = Rounding(run, is_thorough=self._is_thorough)
        return self._roundings[way]


@contextmanager
def _tracing(trace: ValueTrace, number: float, around: AbstractContextManager[object] | None = None) -> Iterator[None]:
    if around is not None:
        with around, _tracing(trace, number):
            yield
        return
    with unwritten_memory_holds(number), trace.following():
        yield


def _told(pair: TwoRuns, origin: RanOp | None, here: str, there: str) -> str:
    """The op that makes the difference, or else those at which the runs part."""
    if origin is not None:
        return _begins(origin)
    parted = pair.parted
    if parted is None or not any(op is not None and op.frame is not None for op in parted):
        return ""
    one, other = (str(op) if op is not None else "nothing more" for op in parted)
    return f"The body goes another way: {here} it runs {one}, {there} {other}"


def _begins(origin: RanOp) -> str:
    if origin.frame is None:
        return ""
    is_unwritten = origin.name.partition(".")[2].removeprefix("new_").startswith("empty")
    return f"It begins in {origin}{', whose memory is read before it is written' if is_unwritten else ''}"
