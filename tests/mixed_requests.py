"""Requests of every kind at once, for tests that compare two ways of running them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from phonograph import SamplingParams
from phonograph.engine.core import EngineCore, StepExecutor
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import GrammarSpec, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.scheduling.scheduler import Scheduler

_GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ASKED = [
    ([5, 9, 200, 3], replace(_GREEDY, presence_penalty=1.5, logit_bias={7: 2.0}, logprobs=3)),
    ([7, 9], replace(_GREEDY, temperature=1.0, seed=3, top_p=0.9, n=2)),
    (list(range(20, 52)), replace(_GREEDY, repetition_penalty=1.3)),
    ([11] * 9, _GREEDY),
    ([40, 41, 42], replace(_GREEDY, grammar=GrammarSpec("regex", "even"))),
    (list(range(20, 48)), replace(_GREEDY, temperature=0.7, seed=1, min_p=0.05, top_k=40)),
]


class Evens:
    """Even tokens alone, and never twice the same."""

    def __init__(self) -> None:
        self._allowed = np.zeros(256, dtype=bool)
        self._allowed[::2] = True

    def mask(self) -> Any:
        return np.packbits(self._allowed, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert self._allowed[token]
        self._allowed[token] = False


class Grammars:
    def prepare(self) -> None:
        """There is nothing to share."""

    def start(self, spec: GrammarSpec, count: int = 1) -> list[Evens]:
        return [Evens() for _ in range(count)]


def served(limits: Limits, executor: StepExecutor) -> tuple[list[Sequence], Scheduler]:
    """All requests, one after the other, to their ends; none of them fails, and nothing is lost."""
    scheduler = Scheduler(limits)
    core, found = EngineCore(scheduler, executor, Grammars()), list[Sequence]()
    for number, (prompt, params) in enumerate(ASKED):
        found += core.add(Request(f"r{number}", tuple(prompt), params, arrival=float(number)))
        core.step()
    while not core.is_idle:
        core.step()
    scheduler.integrity()
    assert [sequence.error for sequence in found] == [""] * len(found)
    return found, scheduler
