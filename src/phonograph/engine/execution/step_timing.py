"""StepTiming: device time of steps, by phase, path and kind, of which some are measured."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from phonograph.devices import Device, Fence
from phonograph.engine.requests.step import StepKind

ALL_OF_FIRST = 16
EVERY = 8
"""Of the first steps of a kind all are measured, then every eighth: two fences that know when they were reached take a
step 8 µs, of 50 that a tiny one has."""


class PassTime(NamedTuple):
    """Passes whose results were read, and the device time of all of them."""

    passes: int = 0
    seconds: float = 0.0


class StepTiming:
    """A step that is not measured counts as long as the last of its phase, path and kind that was; or on any path."""

    def __init__(self, device: Device, depth: int) -> None:
        """`depth` is the number of steps that may be in flight."""
        self._fences = [device.fence(timed=True) for _ in range(depth)]
        self._num_fences = 0
        self._launched: defaultdict[tuple[str, StepKind], int] = defaultdict(int)
        self._last: dict[tuple[str, str, StepKind], float] = {}
        """By phase, path and kind; with no path, on any."""
        self.every = EVERY
        """1 measures all steps, as benchmarks do."""
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        """By phase and path (`replay` or `eager`)."""
        self.passes: defaultdict[tuple[str, StepKind], PassTime] = defaultdict(PassTime)
        """The same, with the number of passes, by phase and kind of step."""

    def begin(self, phase: str, kind: StepKind) -> Fence | None:
        """A fence that is put before a step which is to be measured."""
        count = self._launched[phase, kind]
        self._launched[phase, kind] = count + 1
        if count >= ALL_OF_FIRST and count % self.every:
            return None
        fence = self._fences[self._num_fences % len(self._fences)]
        self._num_fences += 1
        fence.record()
        return fence

    def add(self, step: tuple[str, str, StepKind], begun: Fence | None, done: Fence) -> None:
        """A step of a phase, path and kind whose results were read."""
        phase, path, kind = step
        if begun is not None:
            self._last[step] = self._last[phase, "", kind] = done.seconds_since(begun)
        seconds = self._last.get(step, self._last.get((phase, "", kind), 0.0))
        self.seconds[phase, path] += seconds
        passes, before = self.passes[phase, kind]
        self.passes[phase, kind] = PassTime(passes + 1, before + seconds)
