"""The engine's own passes on a GPU, with the guard set to refuse: no finding, in ops or in nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from phonograph.cli.main import main
from phonograph.engine.execution.startup_verification import guard_recordings
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.graphs.planning.settings import Asked, ask
from phonograph.graphs.progress import silent
from phonograph.graphs.trust.guard import guard

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"max_seqs": 4, "max_tokens": 64, "max_len": 128},
    "smollm2-135m": {"max_seqs": 16, "max_tokens": 512, "max_len": 1024, "cache_tokens": 16_384},
    "qwen3-0.6b": {"max_seqs": 32, "max_tokens": 2048, "max_len": 2048, "cache_tokens": 32_768},
}


@pytest.mark.parametrize("shape", SIZES)
def test_the_guard_refuses_nothing_of_the_engine(shape: str) -> None:
    refusing = Asked((ask("guard", "refuse", origin="a test"),))
    llm = EngineArguments(None, shape, "cuda", EngineOptions(verify="fast", **SIZES[shape]), refusing).open()
    assert llm.plan.guard == "refuse"
    for report in llm.reports:
        assert not report.findings, str(report)
        assert not report.failures, str(report)
    for name, runner in llm.executor.runners.items():
        with torch.inference_mode():
            found = guard(runner, sizes="ends", nodes=True)
        assert found.ok, f"{name}: {found}"
        assert not any("nodes unseen" in text for text in found.unseen), f"{name}: {found}"


def test_a_start_that_checks_everything_finds_nothing_either() -> None:
    """Every size by ops at capture, every recording by nodes after it; opening raises on a finding."""
    llm = EngineArguments(None, "tiny", "cuda", EngineOptions(verify="all", **SIZES["tiny"])).open()
    for name, runner in llm.executor.runners.items():
        assert runner.options.guarded == "all"
        assert runner.captured, name
        assert runner.report is not None
        assert not runner.report.findings, str(runner.report)
    found = guard_recordings(llm.executor, "all", silent)
    assert set(found) == set(llm.executor.runners)
    assert all(report.ok for report in found.values()), "\n".join(map(str, found.values()))


def test_the_command_and_the_trace_show_what_nodes_hide(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape", "tiny", "--device", "cuda", "--max-seqs", "2", "--max-step-tokens", "8", "--max-len", "64"]
    assert main(["verify", *flags]) == 0
    shown = capsys.readouterr().out
    for name in ("decode", "prefill", "idle"):
        assert re.search(rf"^{name}: guard: \d+ shapes run on several samples, 0 that differ or fail$", shown, re.M)
    assert main(["explain", "--trace", "decode", *flags]) == 0
    shown = capsys.readouterr().out
    assert "decode: guard: 3 shapes run on several samples, 0 that differ or fail" in shown
    assert "kernel " in shown
