"""StepTiming: device time of steps, by phase, path and kind, of which some are measured."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple, get_args

from phonograph.devices import Device, Fence
from phonograph.engine.requests.step import StepKind

ALL_OF_FIRST = 16
EVERY = 16
"""Of the first steps of a kind all are measured, then one in sixteen, by chance, since steps may have a rhythm. Two
fences that know when they were reached cost 3 µs of host time a step, and more on the device."""


class PassTime(NamedTuple):
    """Passes whose results were read, and the device time of all of them."""

    passes: int = 0
    seconds: float = 0.0


class _PathTime:
    """Steps on one path."""

    __slots__ = ("last", "passes", "seconds")

    def __init__(self, last: float) -> None:
        self.last = last
        """The device time of the last one that was measured."""
        self.passes = 0
        self.seconds = 0.0


class TimedSteps:
    """Steps of one phase and kind. One that is not measured counts as long as the last on its path that was; or on any
    path."""

    __slots__ = ("_fence", "_num_measured", "_num_skipped", "by_path", "num_to_skip")

    def __init__(self, fence: Callable[[], Fence], num_skipped: Callable[[], int]) -> None:
        """`fence` is the next that may be recorded; `num_skipped` draws how many steps are not measured after one."""
        self._fence = fence
        self._num_skipped = num_skipped
        self._num_measured = 0
        self.num_to_skip = 0
        """Of the next steps, those that are not measured."""
        self.by_path: dict[str, _PathTime] = {}

    def begin(self) -> Fence | None:
        """A fence that is put before a step which is to be measured."""
        if self.num_to_skip:  # nothing is drawn or looked up in most steps
            self.num_to_skip -= 1
            return None
        self._num_measured += 1
        if self._num_measured >= ALL_OF_FIRST:
            self.num_to_skip = self._num_skipped()
        fence = self._fence()
        fence.record()
        return fence

    def add(self, path: str, begun: Fence | None, done: Fence) -> None:
        """A step on a path (`replay` or `eager`) whose results were read."""
        found = self.by_path.get(path)
        if found is None:
            others = [other.last for other in self.by_path.values()]
            found = self.by_path[path] = _PathTime(others[-1] if others else 0.0)
        if begun is not None:
            found.last = done.seconds_since(begun)
        found.passes += 1
        found.seconds += found.last


class StepTiming:
    """The steps of all phases, and the fences before those that are measured."""

    def __init__(self, device: Device, depth: int, phases: Iterable[str]) -> None:
        """`depth` is the number of steps that may be in flight."""
        self._fences = [device.fence(timed=True) for _ in range(depth)]
        self._num_fences = 0
        self._numbers = random.Random(0)
        self._every = EVERY
        self.steps: dict[tuple[str, StepKind], TimedSteps] = {
            (phase, kind): TimedSteps(self._next_fence, self._num_skipped)
            for phase in phases
            for kind in get_args(StepKind)
        }

    @property
    def every(self) -> int:
        """One step in so many is measured; 1 measures all, as benchmarks do."""
        return self._every

    @every.setter
    def every(self, every: int) -> None:
        self._every = every
        for steps in self.steps.values():
            steps.num_to_skip = 0

    def _next_fence(self) -> Fence:
        fence = self._fences[self._num_fences % len(self._fences)]
        self._num_fences += 1
        return fence

    def _num_skipped(self) -> int:
        """Any number up to twice the mean, which is one less than `every`."""
        return int(self._numbers.random() * (2 * self._every - 1))

    @property
    def seconds(self) -> dict[tuple[str, str], float]:
        """Device time by phase and path; it grows as results are read."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (phase, _), steps in self.steps.items():
            for path, time in steps.by_path.items():
                found[phase, path] += time.seconds
        return dict(found)

    @property
    def passes(self) -> dict[tuple[str, StepKind], PassTime]:
        """The same, with the number of passes, by phase and kind of step."""
        return {
            key: PassTime(sum(time.passes for time in times), sum(time.seconds for time in times))
            for key, steps in self.steps.items()
            if (times := steps.by_path.values())
        }
