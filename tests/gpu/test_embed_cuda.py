"""Embeddings on a real GPU: recorded sums of hidden states against eager, in bfloat16 and in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phonograph import LLM, EngineOptions, SamplingParams, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.embed import sum_spans
from phonograph.engine.passes.registry import EMBED
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 161)), [11] * 9, list(range(100, 117))]


def engine(backend: str, dtype: torch.dtype) -> LLM:
    options = EngineOptions(max_seqs=8, max_tokens=64, max_len=512, cache_tokens=4096, dtype=dtype, embeddings=True)
    asked = [ask("embed.backend", backend, origin="test")]
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="cuda", options=options, asked=asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_a_replay_is_near_eager(backend: str, dtype: torch.dtype) -> None:
    on, off = engine(backend, dtype), engine("disabled", dtype)
    for pooling in ("mean", "last"):
        found: Any = on.embed(PROMPTS, pooling)
        np.testing.assert_allclose(found, off.embed(PROMPTS, pooling), atol=1e-5 if dtype == torch.float32 else 1e-2)
        assert np.array_equal(found, on.embed(PROMPTS, pooling)), "sums are in one order"
    assert sum(on.executor.runners[EMBED.name].stats.replays.values())
    report = verify(on.executor.runners[EMBED.name])
    assert report.ok, str(report)
    assert on.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].tokens


def test_spans_are_summed_in_a_graph() -> None:
    states = torch.randn(4096, 1024, device="cuda")
    starts, stops = torch.zeros((2, 64), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    sum_spans(states, starts, stops)
    with torch.cuda.graph(graph):
        found = sum_spans(states, starts, stops)
    starts[:3], stops[:3] = torch.tensor([0, 10, 4000]), torch.tensor([10, 3000, 4096])
    graph.replay()
    expected = torch.stack([states[:10].sum(0), states[10:3000].sum(0), states[4000:].sum(0)])
    torch.testing.assert_close(found[:3], expected, atol=1e-3, rtol=1e-4)
    assert not found[3:].any()
