"""StepTiming: device time of steps, by phase, path and kind, of which some are measured."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import NamedTuple

from phonograph.devices import Device, Fence
from phonograph.engine.requests.step import StepKind

ALL_OF_FIRST = 16
EVERY = 8
"""Of the first steps of a kind all are measured, then one in eight, by chance, since steps may have a rhythm. Two
fences that know when they were reached cost 3 µs of host time a step, and more on the device."""


class PassTime(NamedTuple):
    """Passes whose results were read, and the device time of all of them."""

    passes: int = 0
    seconds: float = 0.0


class _Steps:
    """Steps of one kind."""

    __slots__ = ("last", "passes", "seconds")

    def __init__(self, last: float = 0.0) -> None:
        self.last = last
        """The device time of the last one that was measured."""
        self.passes = 0
        self.seconds = 0.0


class StepTiming:
    """A step that is not measured counts as long as the last of its phase, path and kind that was; or on any path."""

    def __init__(self, device: Device, depth: int) -> None:
        """`depth` is the number of steps that may be in flight."""
        self._fences = [device.fence(timed=True) for _ in range(depth)]
        self._num_fences = 0
        self._launched: dict[tuple[str, StepKind], int] = {}
        self._numbers = random.Random(0)
        self._steps: dict[tuple[str, str, StepKind], _Steps] = {}
        self.every = EVERY
        """1 measures all steps, as benchmarks do."""

    def begin(self, phase: str, kind: StepKind) -> Fence | None:
        """A fence that is put before a step which is to be measured."""
        key = phase, kind
        count = self._launched.get(key, 0)
        self._launched[key] = count + 1
        if count >= ALL_OF_FIRST and self._numbers.random() * self.every >= 1:
            return None
        fence = self._fences[self._num_fences % len(self._fences)]
        self._num_fences += 1
        fence.record()
        return fence

    def add(self, step: tuple[str, str, StepKind], begun: Fence | None, done: Fence) -> None:
        """A step of a phase, path (`replay` or `eager`) and kind whose results were read."""
        steps = self._steps.get(step)
        if steps is None:
            steps = self._steps[step] = _Steps(self._last_of(step))
        if begun is not None:
            steps.last = done.seconds_since(begun)
        steps.passes += 1
        steps.seconds += steps.last

    def _last_of(self, step: tuple[str, str, StepKind]) -> float:
        """As long as the last of the kind on another path."""
        alike = [found.last for (phase, _, kind), found in self._steps.items() if (phase, kind) == (step[0], step[2])]
        return alike[-1] if alike else 0.0

    @property
    def seconds(self) -> dict[tuple[str, str], float]:
        """Device time by phase and path; it grows as results are read."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (phase, path, _), steps in self._steps.items():
            found[phase, path] += steps.seconds
        return dict(found)

    @property
    def passes(self) -> dict[tuple[str, StepKind], PassTime]:
        """The same, with the number of passes, by phase and kind of step."""
        found: defaultdict[tuple[str, StepKind], PassTime] = defaultdict(PassTime)
        for (phase, _, kind), steps in self._steps.items():
            passes, seconds = found[phase, kind]
            found[phase, kind] = PassTime(passes + steps.passes, seconds + steps.seconds)
        return dict(found)
