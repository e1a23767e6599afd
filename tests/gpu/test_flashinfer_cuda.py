"""FlashInfer behind the protocol: right on pages, in any order of plans, and inside the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged import LAUNCHES, Case, Heads, by_hand, case_of, spans_of

pytest.importorskip("flashinfer")

from phonograph import LLM
from phonograph.devices import open_device
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.attention.flashinfer import FlashInferAttention
from phonograph.engine.ops.attention.triton import TritonAttention
from phonograph.engine.options import AttentionName, EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import PlanError
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.gpu

QWEN3 = Heads(32, 8, 128)
STEPS = {
    "one": [(0, 300)],
    "behind prefixes": [(100, 120), (0, 33), (64, 1), (211, 97)],
    "mixed": [(300, 1), (31, 1), (0, 1), (0, 90), (20, 7)],
}


def told(step: str) -> Case:
    spans = spans_of(*STEPS[step])
    case = case_of(spans, QWEN3, padding=5, page_size=16, dtype=torch.bfloat16)
    return replace(case, queries=replace(case.queries, spans=tuple(spans)))


def test_steps_planned_one_after_the_other_keep_their_plans() -> None:
    attention = FlashInferAttention(open_device("cuda"), TritonAttention(LAUNCHES))
    cases = [told(step) for step in STEPS] * 4
    found = [case.run(attention, layer=1) for case in cases]  # nothing waits for the device in between
    for case, out in zip(cases, found, strict=True):
        wanted = by_hand(case, layer=1)
        assert ((out.double() - wanted).norm() / wanted.norm()).item() <= 1e-2


def test_without_spans_the_inner_attention_attends() -> None:
    case = told("mixed")
    plain = replace(case, queries=replace(case.queries, spans=None))
    attention = FlashInferAttention(open_device("cuda"), TritonAttention(LAUNCHES))
    assert torch.equal(plain.run(attention), plain.run(TritonAttention(LAUNCHES)))


def opened(attention: AttentionName) -> LLM:
    options = EngineOptions(max_seqs=8, max_tokens=256, max_len=512, cache_tokens=4096, attention=attention)
    return LLM(RandomCheckpoint(replace(SHAPES["qwen3-8b"], num_layers=2, vocab=2048)), device="cuda", options=options)


def test_the_engine_answers_as_with_triton() -> None:
    prompts = [[7 * i + j for j in range(30 + 50 * i)] for i in range(6)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    llm = opened("flashinfer")
    assert llm.plan.phase("prefill").backend == "breakable"
    ours, theirs = llm.generate(prompts, params), opened("triton").generate(prompts, params)
    first = [(one.tokens[0], other.tokens[0]) for one, other in zip(ours, theirs, strict=True)]
    assert sum(one == other for one, other in first) >= 5, f"bfloat16 may flip one near tie: {first}"
    assert "flashinfer; triton in decode steps" in llm.explain()


def test_a_full_graph_for_prompts_is_refused() -> None:
    asked = [ask("prefill.backend", "full", origin="asked=")]
    with pytest.raises(PlanError, match="breakable"):
        LLM(
            RandomCheckpoint(SHAPES["tiny"]),
            device="cuda",
            options=EngineOptions(attention="flashinfer"),
            asked=asked,
        )
