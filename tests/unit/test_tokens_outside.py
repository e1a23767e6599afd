"""Tokens that are in no vocabulary fail their request by name, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.models.config import SHAPES
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import NO_TOKEN, Sampled, ScheduledStep
from phonograph.engine.scheduling.scheduler import Scheduler

_GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_PROMPTS = [(5, 9, 200, 3), (7,), (11, 12)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    options = EngineOptions(max_seqs=4, max_tokens=16, max_len=64, page_size=8, dtype=torch.float32, max_ahead=2)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options)


class Spoiling:
    """An executor that gives another token in place of the second row's, from the fourth step on."""

    def __init__(self, inner: Any, token: int) -> None:
        self.inner, self._token, self._num = inner, token, 0
        self.vocab, self.step_tables = inner.vocab, inner.step_tables
        self.launch, self.put_back, self.heartbeat = inner.launch, inner.put_back, inner.heartbeat

    def collect(self, launched: Any) -> Sampled:
        sampled: Sampled = self.inner.collect(launched)
        self._num += 1
        if self._num != 4:
            return sampled
        return replace(sampled, tokens=[sampled.tokens[0], self._token, *sampled.tokens[2:]])


def served(llm: LLM, executor: Any, params: SamplingParams = _GREEDY) -> list[Sequence]:
    core = EngineCore(Scheduler(llm.limits), executor)
    found = [core.add(Request(str(number), prompt, params))[0] for number, prompt in enumerate(_PROMPTS)]
    news = list[Any]()
    while not core.is_idle:
        news += core.step()
    core.scheduler.integrity()
    assert [sum(finish is not None for one, _, finish in news if one is sequence) for sequence in found] == [1] * 3
    return found


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("outside", [0, 1, 1 << 40])
def test_a_token_past_the_vocabulary_fails_its_request_alone(llm: LLM, outside: int, logprobs: int | None) -> None:
    token, params = llm.executor.vocab + outside, replace(_GREEDY, logprobs=logprobs)
    right = [one.outputs for one in served(llm, llm.executor, params)]
    found = served(llm, Spoiling(llm.executor, token), params)
    assert [found[0].outputs, found[2].outputs] == [right[0], right[2]]
    assert found[1].outputs == right[1][: len(found[1].outputs)]
    assert found[1].finish is FinishReason.ERROR
    assert f"returned {token}, which is not in the vocabulary of {llm.executor.vocab}" in found[1].error
    assert "Sampler.pick" in found[1].error
    assert len(found[1].logprobs) == (0 if logprobs is None else len(found[1].outputs))


@pytest.mark.parametrize("code", [NO_TOKEN, -4, -(1 << 40)])
def test_a_problem_that_nobody_knows_is_told_as_it_is(llm: LLM, code: int) -> None:
    found = served(llm, Spoiling(llm.executor, code))
    assert f"returned {code}, which is not a token, nor a problem that is known" in found[1].error
    assert [one.error for one in (found[0], found[2])] == ["", ""]


def test_the_last_token_of_the_vocabulary_is_one(llm: LLM) -> None:
    found = served(llm, Spoiling(llm.executor, llm.executor.vocab - 1))
    assert [one.error for one in found] == [""] * 3
    assert llm.executor.vocab - 1 in found[1].outputs


def test_of_rounds_the_row_is_named() -> None:
    sequences = [Sequence(Request(name, (1, 2)), 0, 9, frozenset(), rank=(1, 0, 0.0, 0)) for name in "abc"]
    step = ScheduledStep(1, tuple(sequences), (), (), 4, pass_name="round")
    sampled = Sampled([1, 99, 3, 256, 300], [2, 0, 3])
    found = sampled.outside(step, 256)
    assert [sequence.request.id for sequence, _ in found] == ["c"]
    assert "returned 300" in found[0][1]
    assert sampled.outside(step, 301) == []
