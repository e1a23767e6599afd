"""Steps are plain data: an executor in another process runs from them alone."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from executor_child import RemoteExecutor, tiny
from phonograph import LLM, SamplingParams
from phonograph.engine.core import EngineCore, StepExecutor
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import GrammarSpec, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.slow

_GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_ASKED = [
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


def generated(llm: LLM, executor: StepExecutor) -> tuple[list[Any], Scheduler]:
    """Tokens and logprobs of all requests; there are too few pages for them, so that some are computed twice."""
    scheduler = Scheduler(replace(llm.limits, reserve_tokens=4))
    core, found = EngineCore(scheduler, executor, Grammars()), list[Sequence]()
    for number, (prompt, params) in enumerate(_ASKED):
        found += core.add(Request(f"r{number}", tuple(prompt), params, arrival=float(number)))
        core.step()
    while not core.is_idle:
        core.step()
    scheduler.integrity()
    assert [sequence.error for sequence in found] == [""] * len(found)
    return [(one.outputs, one.logprobs) for one in found], scheduler


@pytest.fixture(params=["cpu", "emulated"], scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(device: str) -> LLM:
    return tiny(device)


@pytest.fixture
def remote(llm: LLM, device: str) -> Iterator[RemoteExecutor]:
    found = RemoteExecutor(device, llm.executor.vocab, llm.executor.step_tables)
    yield found
    found.close()


def test_an_executor_in_another_process_runs_from_steps_alone(llm: LLM, remote: RemoteExecutor) -> None:
    expected, _ = generated(llm, llm.executor)
    found, scheduler = generated(llm, remote)
    assert found == expected
    assert scheduler.counts.preemptions > 0
    assert scheduler.counts.prefix_hit_tokens > 0
    sent: list[Step] = [pickle.loads(step) for step in remote.sent]
    assert any(step.prefills and len(step.decodes.rows) for step in sent)
    follows = [step for before, step in pairwise(sent) if step.decodes.version == before.decodes.version]
    assert any(step.updates is None for step in follows)


def test_a_step_that_raises_there_is_put_back_from_here(llm: LLM, remote: RemoteExecutor) -> None:
    expected, _ = generated(llm, llm.executor)
    remote.fails_at = 7
    found, _ = generated(llm, remote)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_a_step_holds_numbers_and_names_alone(llm: LLM, remote: RemoteExecutor) -> None:
    generated(llm, remote)
    for step in map(pickle.loads, remote.sent):
        assert_plain(step)


def assert_plain(value: object) -> None:
    if dataclasses.is_dataclass(value):
        assert type(value).__name__ in {"Decodes", "PromptChunk", "SamplingNeeds", "Step", "TableUpdates", "Write"}
        for field in dataclasses.fields(value):
            assert_plain(getattr(value, field.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            assert isinstance(key, str)
            assert_plain(item)
    elif isinstance(value, tuple):
        for item in value:
            assert_plain(item)
    else:
        assert isinstance(value, int | str | Enum | np.ndarray | None), type(value)
