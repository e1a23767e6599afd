"""Where answers part: margins that rounding explains, and those that it does not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engine_logits import sequence_logits
from partings import BEYOND, EXACT, STEPS, Judge, Picking, off_by, parting
from same_answers import ways

from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.completion import Completion
from phonograph.engine.models.config import SHAPES

NEW_TOKENS = 24
WAYS = {
    **ways(NEW_TOKENS),
    "few": replace(ways(NEW_TOKENS)["drawn"], top_k=5, min_p=0.05),
    "hot": replace(ways(NEW_TOKENS)["drawn"], temperature=1.5, presence_penalty=0.5, seed=1 << 40),
}


def opened(dtype: torch.dtype) -> LLM:
    options = EngineOptions(dtype=dtype, max_seqs=8, max_len=128, verify="off", prefix_cache=False)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options)


@pytest.fixture(scope="module")
def exact() -> LLM:
    return opened(torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    numbers = random.Random(3)
    return [[numbers.randrange(3, 256) for _ in range(numbers.randrange(1, 20))] for _ in range(200)]


def said(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    return llm.generate(prompts, params)


@pytest.mark.parametrize("way", WAYS)
def test_what_an_engine_says_may_be_and_nothing_else(way: str, exact: LLM, prompts: list[list[int]]) -> None:
    """In float32: at every place the token that came, and no other."""
    params = WAYS[way]
    for one in said(exact, prompts[:4], params):
        logits = sequence_logits(exact, [*one.prompt, *one.tokens])
        for place, token in enumerate(one.tokens):
            picking = Picking(logits[len(one.prompt) + place - 1], one.prompt, one.tokens[:place], params)
            assert picking.may_be(token, EXACT)
            others = random.Random(place).sample(range(SHAPES["tiny"].vocab), 3)
            assert not any(picking.may_be(other, EXACT) for other in others if other != token)


@pytest.mark.parametrize("way", WAYS)
def test_rounding_explains_where_bfloat16_parts(way: str, exact: LLM, prompts: list[list[int]]) -> None:
    rounded, params = opened(torch.bfloat16), WAYS[way]
    true, found = said(exact, prompts, params), said(rounded, prompts, params)
    texts = [[*one.prompt, *one.tokens] for one in found[:8]]
    judge = Judge(exact, off_by(exact, texts, [sequence_logits(rounded, text) for text in texts]))
    assert judge.unit > EXACT / 2
    told = judge.margins(found, true, params)
    assert (
        sum(told.values()) == sum(parting(one, other) is not None for one, other in zip(found, true, strict=True)) > 0
    )
    assert told[BEYOND] == 0
    assert told["8.0"] <= 2
    assert list(told) == [*map(str, STEPS), BEYOND]


@pytest.mark.parametrize(
    "fault",
    [{"seed": 8}, {"repetition_penalty": 1.0}, {"frequency_penalty": 0.0}, {"top_p": 0.3}, {"temperature": 0.5}],
    ids=lambda fault: next(iter(fault)),
)
def test_what_is_picked_otherwise_is_beyond(fault: dict[str, float], exact: LLM, prompts: list[list[int]]) -> None:
    """Whatever a drafter would break."""
    params = replace(WAYS["penalised"], repetition_penalty=8.0, frequency_penalty=2.0)
    some = prompts[:24]
    right, wrong = said(exact, some, params), said(exact, some, replace(params, **fault))  # type: ignore[arg-type]
    told = Judge(exact, 0.0).margins(wrong, right, params)
    assert told[BEYOND] > 6
