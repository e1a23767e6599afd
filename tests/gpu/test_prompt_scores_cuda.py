"""Scores of prompts on a real GPU: what graphs and Triton's kernels give, against float32 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.gpu

LONG = [(7 * place + place * place) % 251 for place in range(90)]
PROMPTS = [[5, 9, 200, 3], [7], LONG, [11] * 9, LONG[:17], LONG[:40]]
SCORED = SamplingParams(max_tokens=2, prompt_logprobs=5, temperature=0.0, ignore_eos=True)


class OnAnyDevice(RandomCheckpoint):
    """The same numbers on every device: those that a CPU draws."""

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(device)) for name, tensor in super().tensors("cpu"))


def engine(device: str, backend: str, dtype: torch.dtype = torch.float32) -> LLM:
    options = EngineOptions(max_seqs=4, max_tokens=32, max_len=96, cache_tokens=1024, page_size=16, dtype=dtype)
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    return LLM(OnAnyDevice(SHAPES["tiny"]), device=device, options=options, asked=asked)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_scores_are_those_of_a_cpu(backend: str, dtype: torch.dtype, near: float) -> None:
    llm = engine("cuda", backend, dtype)
    found, wanted = (one.generate(PROMPTS, SCORED) for one in (llm, engine("cpu", "disabled")))
    for mine, theirs in zip(found, wanted, strict=True):
        assert len(mine.prompt_logprobs) == len(mine.prompt) - 1
        for one, other in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=near)
            values = [value for _, value in one.top]
            assert values == pytest.approx([value for _, value in other.top], abs=near)
            assert values == sorted(values, reverse=True)
            assert one.rank > sum(value > one.logprob for value in values)
            if one.token in (token for token, _ in one.top):
                assert one.rank <= sum(value >= one.logprob for value in values)
    assert sum(runner.stats.eager.total() for runner in llm.executor.runners.values()) == 0
