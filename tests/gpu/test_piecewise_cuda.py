"""tc_piecewise on a real GPU: both compilers, one program for all buckets, and the engine's own passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phonograph import (
    LLM,
    Buckets,
    Extent,
    Pad,
    Replay,
    SamplingParams,
    Slot,
    Stage,
    current,
    graph_break,
    graphed,
    opaque,
)
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


def other_rows(extent: Extent, seed: int) -> dict[str, torch.Tensor]:
    """Two rows that write one place would be in no order."""
    num, numbers = extent.used["seqs"], torch.Generator().manual_seed(seed)
    rows = torch.randperm(64, generator=numbers)[:num] + 1
    return {"x": torch.randn(num, 512, generator=numbers).cuda(), "rows": rows.cuda()}


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
        sample=other_rows,
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


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_code_may_ask_torch_whether_it_is_compiled_or_captured(compiler: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def note(where: str) -> None:
        answers = torch.compiler.is_compiling(), torch.cuda.is_current_stream_capturing()
        with seen.open("a") as file:
            file.write(f"{where} {current().stage.value} {answers[0]} {answers[1]}\n")

    def recorded(q: torch.Tensor) -> torch.Tensor:
        note("recorded")
        return q + 0

    @graph_break(fake=torch.empty_like)
    def gap(q: torch.Tensor) -> torch.Tensor:
        note("gap")
        return q + 0

    kernel = opaque(recorded, fake=torch.empty_like)

    def body(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            assert current().stage is Stage.COMPILING
            assert not torch.cuda.is_current_stream_capturing()
        return gap(kernel(x) * 2) + 1

    slots = [Slot("x", ("seqs", 4), torch.float32)]
    sizes = Buckets.of(2, 4)
    run = graphed(
        body,
        slots=slots,
        bucketed="seqs",
        buckets=sizes,
        backend="tc_piecewise",
        tc_compiler=compiler,
        device="cuda",
        facts="off",
        guard="off",
    )
    assert not run.capture(silent).failures
    run(x=torch.zeros(2, 4, device="cuda"))
    run(x=torch.zeros(9, 4, device="cuda"))
    found = set(seen.read_text().splitlines())
    assert {"recorded warming False False", "recorded capturing False True", "recorded eager False False"} <= found
    assert {line for line in found if line.startswith("gap")} == {
        f"gap {stage} False False" for stage in ("warming", "capturing", "replaying", "eager")
    }


def test_a_compiled_body_is_recorded_whole_and_compiles_nothing_in_the_capture() -> None:
    slots = [Slot("x", ("seqs", 64), torch.float32)]
    weight = torch.randn(64, 64, device="cuda") / 8
    compiled = torch.compile(lambda x: torch.nn.functional.silu(x @ weight) * 2, dynamic=True)
    run = graphed(
        lambda x: compiled(x) + 1, slots=slots, bucketed="seqs", buckets=Buckets.of(2, 8), backend="full", device="cuda"
    )
    assert not run.capture(silent).failures
    x = torch.randn(5, 64, device="cuda")
    torch.testing.assert_close(run(x=x), compiled(x) + 1, rtol=1e-4, atol=1e-4)
    assert isinstance(run.runner.last, Replay)

    fixed = torch.compile(lambda x: torch.relu(x) * 2, dynamic=False)

    def late(x: torch.Tensor) -> torch.Tensor:
        return fixed(x.t().contiguous().t() if current().stage is Stage.CAPTURING else x)

    refused = graphed(
        late, slots=slots, bucketed="seqs", buckets=[8], backend="full", device="cuda", guard="off", facts="off"
    )
    assert "in the middle of a capture" in str(refused.capture(silent).failures[0].error)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_no_piece_copies_the_cache(compiler: str) -> None:
    options = EngineOptions(max_seqs=4, max_tokens=32, max_len=96, dtype=torch.bfloat16, cache_tokens=2_000_000)
    asked = [ask(f"{phase}.backend", "tc_piecewise", origin="test") for phase in ("decode", "prefill")]
    asked.append(ask("tc_compiler", compiler, origin="test"))
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cuda", options=options, asked=asked)
    least = min(min(kept.keys.nbytes, kept.values.nbytes) for kept, _ in llm.executor.cache.places)
    assert least > 100e6
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for runner in llm.executor.runners.values():
        runner.capture(silent)
    llm.generate(PROMPTS, GREEDY)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < least / 2, f"{grown:,} bytes, the smallest part of the cache has {least:,}"
