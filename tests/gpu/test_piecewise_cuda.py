"""tc_piecewise on a real GPU: both compilers, one program for all buckets, and the engine's own passes."""

from __future__ import annotations

import pytest
import torch

from phonograph import LLM, Buckets, Pad, Replay, SamplingParams, Slot, graph_break, graphed
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.progress import silent
from phonograph.graphs.recording.backends.tc_piecewise import TcPiecewiseBackend

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@graph_break(fake=lambda q, rows, cache: torch.empty_like(q), mutates=("cache",))
def host_side(q: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Writes state and reads from the host: no graph could hold it."""
    cache[rows] = q
    return cache[rows] * (1.0 + 0.0 * q.sum().item())


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_one_program_serves_all_buckets(compiler: str) -> None:
    weight, cache = torch.randn(512, 512, device="cuda") / 23, torch.zeros(65, 512, device="cuda")

    def body(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.silu(x @ weight) * x.sum(-1, keepdim=True).tanh()
        h = host_side(h, rows, cache)
        return torch.nn.functional.rms_norm(h, (512,)) + h

    slots = [
        Slot("x", ("seqs", 512), torch.float32),
        Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, 64)),
    ]
    run = graphed(
        body,
        slots=slots,
        bucketed="seqs",
        buckets=Buckets.of(1, 2, 8, 64),
        backend="tc_piecewise",
        tc_compiler=compiler,
        device="cuda",
    )
    report = run.capture(silent, verify=True)
    assert not report.failures, report
    assert {row.num_graphs for row in report.rows} == {2}
    assert isinstance(run.runner.backend, TcPiecewiseBackend)
    assert run.runner.backend.num_programs == 1
    for num in (1, 2, 5, 64):
        x, rows = torch.randn(num, 512, device="cuda"), torch.randperm(64, device="cuda")[:num] + 1
        found = run(x=x, rows=rows)
        assert isinstance(run.runner.last, Replay)
        torch.testing.assert_close(found, body(x, rows), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_engine_gives_the_tokens_of_the_other_backends(compiler: str) -> None:
    def made(backend: str) -> LLM:
        options = EngineOptions(max_seqs=4, max_tokens=32, max_len=96, page_size=16, dtype=torch.float32)
        asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
        asked.append(ask("tc_compiler", compiler, origin="test"))
        return LLM(RandomCheckpoint(SHAPES["tiny"]), device="cuda", options=options, asked=asked)

    llm = made("tc_piecewise")
    found, wanted = (one.generate(PROMPTS, GREEDY) for one in (llm, made("full")))
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert all(runner.stats.eager.total() == 0 for runner in llm.executor.runners.values())
