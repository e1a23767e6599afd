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
from mixed_requests import served
from phonograph import LLM
from phonograph.engine.core import StepExecutor
from phonograph.engine.passes.step import Step
from phonograph.engine.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.slow


def generated(llm: LLM, executor: StepExecutor) -> tuple[list[Any], Scheduler]:
    """Tokens and logprobs of all requests; there are too few pages for them, so that some are computed twice."""
    found, scheduler = served(replace(llm.limits, reserve_tokens=4), executor)
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


@pytest.mark.faults
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
