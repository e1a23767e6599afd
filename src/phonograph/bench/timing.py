"""Timing of calls: on the device by fences, on the host by its clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from phonograph.devices import Device

_CALLS_PER_ROUND = 20
_WARM_UPS = 3


def device_seconds(device: Device, call: Callable[[], object], rounds: int = 10) -> float:
    """Median time of a call on the device; calls follow each other without a pause, so the host's share is hidden."""
    fences = [device.fence(timed=True) for _ in range(_WARM_UPS + rounds + 1)]
    fences[0].record()
    for fence in fences[1:]:
        call()
        fence.record()
    device.synchronize()
    times = [after.seconds_since(before) for before, after in itertools.pairwise(fences)]
    return statistics.median(times[_WARM_UPS:])


def host_seconds(device: Device, call: Callable[[], object], rounds: int) -> float:
    """Median time of a call on the host over rounds of 20, the device drained between rounds."""
    for _ in range(_CALLS_PER_ROUND):
        call()
    times = []
    for _ in range(rounds):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS_PER_ROUND):
            call()
        times.append((time.perf_counter() - begin) / _CALLS_PER_ROUND)
    return statistics.median(times)


class Deadline:
    """How much time is left for what is being measured."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()

    @property
    def is_past(self) -> bool:
        return self.left <= 0
