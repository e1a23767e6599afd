"""EngineDriver: runs an engine's core step by step, with a clock on the host and on the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from phonograph.bench.measurement import greedy
from phonograph.bench.workloads import Ids, Job
from phonograph.engine.llm import LLM
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Update
from phonograph.errors import PhonographError


@dataclass(frozen=True)
class StepTime:
    """One step: seconds between two steps on the host, and on the device the seconds of the step that was collected."""

    wall: float
    device: float


@dataclass
class Stream:
    """When a request was due and when its tokens came, in seconds from the start."""

    due: float
    times: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Time to first token."""
        return self.times[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [after - before for before, after in itertools.pairwise(self.times)]


class EngineDriver:
    """Puts requests into a core and steps it."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm.core
        self._device = llm.device
        self._executor = llm.executor
        self._executor.timing.every = 1
        self._numbers = itertools.count()

    def add(self, prompt: Ids, new_tokens: int, due: float = 0.0) -> Sequence:
        """Queue a greedy request."""
        number = next(self._numbers)
        request = Request(f"bench-{number}", tuple(prompt), greedy(new_tokens), arrival=due)
        return self._core.add(request)[0]

    def seat(self, prompts: Iterable[Ids], new_tokens: int) -> list[Sequence]:
        """Prefill these prompts; returns when all of them decode."""
        sequences = [self.add(prompt, new_tokens) for prompt in prompts]
        while not all(sequence.outputs for sequence in sequences):
            self.step()
        return sequences

    def step(self) -> list[Update]:
        """One step; a request that fails ends the measurement."""
        updates = self._core.step()
        for sequence, _, finish in updates:
            if finish is not None and sequence.error:
                raise PhonographError(f"measuring: {sequence.request.id} failed: {sequence.error}")
        return updates

    def steady(self, count: int) -> list[StepTime]:
        """Times of `count` steps, launched ahead as the engine does it."""
        times = []
        before, busy = time.perf_counter(), self.device_total
        for _ in range(count):
            self.step()
            now, total = time.perf_counter(), self.device_total
            times.append(StepTime(now - before, total - busy))
            before, busy = now, total
        return times

    def host_alone(self, count: int) -> list[float]:
        """Seconds that the host works for a step: the device is drained before each, so that nothing is waited for."""
        times = []
        for _ in range(count):
            self._device.synchronize()
            begin = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begin)
        return times

    def one_each(self, groups: Iterable[Many[Ids]]) -> list[StepTime]:
        """A prefill step for every group of prompts, of one new token each, launched one after the other."""
        times = []
        before, busy = time.perf_counter(), self.device_total
        for group in groups:
            for prompt in group:
                self.add(prompt, 1)
            self.step()
            now, total = time.perf_counter(), self.device_total
            times.append(StepTime(now - before, total - busy))
            before, busy = now, total
        self.drain()
        return times[1:]  # the first call has launched and collected nothing

    def serve(self, arrivals: Many[Job], clock: Callable[[], float] = time.perf_counter) -> list[Stream]:
        """Requests as they come; times are of the moment that a step's tokens are on the host."""
        waiting = list(reversed(arrivals))
        streams: dict[Sequence, Stream] = {}
        start = clock()
        while waiting or not self._core.is_idle:
            while waiting and waiting[-1].due <= clock() - start:
                one = waiting.pop()
                streams[self.add(one.prompt, one.max_tokens, one.due)] = Stream(one.due)
            if self._core.is_idle:
                time.sleep(max(0.0, waiting[-1].due - (clock() - start)))
                continue
            updates = self.step()
            now = clock() - start
            for sequence, tokens, _ in updates:
                streams[sequence].times += [now] * len(tokens)
        return list(streams.values())

    def drain(self, sequences: Iterable[Sequence] = ()) -> None:
        """Cancel these, and step until nothing is left."""
        for sequence in sequences:
            self._core.cancel(sequence.request.id)
        while not self._core.is_idle:
            self.step()

    @property
    def device_total(self) -> float:
        """Seconds on the device of all steps that were collected so far."""
        return sum(self._executor.timing.seconds.values())
