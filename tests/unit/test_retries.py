"""A step that raises, wherever it does, is run again exactly: nobody loses a token, and nobody gets another one."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.step_builder import StepBuilder
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.slow

_GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
_ASKED = [
    ([5, 9, 200, 3], replace(_GREEDY, presence_penalty=1.5, frequency_penalty=0.5, logprobs=3)),
    ([7, 9], replace(_GREEDY, temperature=1.0, seed=3, top_p=0.9)),
    (list(range(20, 61)), replace(_GREEDY, repetition_penalty=1.3)),
    ([11] * 9, _GREEDY),
    (list(range(100, 117)), replace(_GREEDY, logprobs=0, frequency_penalty=1.0)),
]
_WATCHED = ("/phonograph/engine/", "/phonograph/devices/", "/phonograph/graphs/running/runner.py")
_PATHS = [("cpu", "disabled"), ("emulated", "full"), ("emulated", "breakable")]
_Site = tuple[str, int, str]
"""(file, first line, name) of a function."""


class Engine:
    """A tiny engine whose decodes get pages a few tokens ahead, so that many steps bring some."""

    def __init__(self, device: str, backend: str) -> None:
        options = EngineOptions(max_seqs=4, max_tokens=16, max_len=96, page_size=4, dtype=torch.float32)
        asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
        self.llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=options, asked=asked)
        self.limits = replace(self.llm.limits, reserve_tokens=4)

    def generate(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and logprobs of all requests; the pages are fresh, so all runs take the same steps."""
        core = EngineCore(Scheduler(self.limits, prefix_cache=False), self.llm.executor)
        found: list[Sequence] = []
        for number, (prompt, params) in enumerate(_ASKED):
            found += core.add(Request(f"r{number}", tuple(prompt), params, arrival=float(number)))
        while not core.is_idle:
            core.step()
        core.scheduler.integrity()
        assert [sequence.error for sequence in found] == [""] * len(found)
        return [seq.outputs for seq in found], [[one.logprob for one in seq.logprobs] for seq in found]


@contextmanager
def watched(executor: Executor, at: int, seen: list[ScheduledStep], trace: Any) -> Iterator[None]:
    """Notes the steps that are built and launched; in one of them every call is traced."""
    build, launch, now = StepBuilder.build, executor.launch, False

    def traced(call: Any, *args: Any) -> Any:
        sys.settrace(trace)
        try:
            return call(*args)
        finally:
            sys.settrace(None)

    def built(builder: StepBuilder, planned: ScheduledStep) -> Any:
        nonlocal now
        seen.append(planned)
        if len(seen) - 1 != at:
            return build(builder, planned)
        step = traced(build, builder, planned)
        now = True
        return step

    def launched(step: Step) -> Any:
        nonlocal now
        is_now, now = now, False
        return traced(launch, step) if is_now else launch(step)

    StepBuilder.build = built  # type: ignore[method-assign,assignment]
    executor.launch = launched  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepBuilder.build = build  # type: ignore[method-assign]
        executor.launch = launch  # type: ignore[method-assign]


def site(code: CodeType) -> _Site | None:
    """Ours, and one that can fail: not what cleans up behind a failure, which a generator's second half is."""
    is_watched = any(part in code.co_filename for part in _WATCHED)
    is_ours = is_watched and not code.co_flags & inspect.CO_GENERATOR
    return (code.co_filename, code.co_firstlineno, code.co_name) if is_ours and code.co_name != "__exit__" else None


class Trip:
    """A failure of one call of a function: when it begins, or when all of its effects are there."""

    def __init__(self, where: _Site | None = None, number: int = 1, event: str = "call") -> None:
        self.calls: Counter[_Site] = Counter()
        self.has_failed = False
        self._where, self._number, self._event = where, number, event

    def __call__(self, frame: FrameType, event: str, value: object) -> Any:
        found = site(frame.f_code)
        if found is None:
            return None
        if event == "call":
            self.calls[found] += 1
        if event == self._event and found == self._where and self.calls[found] >= self._number and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("injected")
        return self


def first(steps: list[ScheduledStep], kind: str) -> int:
    """The number of the first step of a kind."""
    is_of_kind = {
        "mixed": lambda step: step.decodes and any(chunk.samples and not chunk.enters for chunk in step.prefills),
        "page edge": lambda step: step.decodes and not step.prefills and step.page_updates,
        "steady": lambda step: not step.prefills and not step.page_updates,
    }[kind]
    return next(number for number, step in enumerate(steps) if number > 2 and is_of_kind(step))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("device", "backend", "kind"),
    [
        *[(device, backend, kind) for device, backend in _PATHS[:2] for kind in ("mixed", "page edge", "steady")],
        (*_PATHS[2], "mixed"),  # its decodes are recorded whole
    ],
)
def test_a_failure_of_any_call_of_a_step_changes_nothing(device: str, backend: str, kind: str) -> None:
    engine = Engine(device, backend)
    executor, seen = engine.llm.executor, list[ScheduledStep]()
    executor.timing.every = 1  # the same calls in every run
    with watched(executor, -1, seen, None):
        right = engine.generate()
    at, calls = first(seen, kind), Trip()
    with watched(executor, at, [], calls):
        assert engine.generate() == right
    assert len(calls.calls) > 10
    for where, count in calls.calls.items():
        for number, event in {(1, "call"), (count // 2 + 1, "call"), (count, "return")}:
            trip = Trip(where, number, event)
            with watched(executor, at, [], trip):
                tokens, logprobs = engine.generate()
            assert trip.has_failed, (where, event)
            assert tokens == right[0], (where, event)
            assert logprobs == [pytest.approx(one, abs=1e-4) for one in right[1]], (where, event)
