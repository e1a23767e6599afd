"""bench/counters.py: what is taken out is taken out, and put back, and a run writes its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import counters
import pytest

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.workloads import Prompts
from phonograph.engine.checkpoints import random_checkpoint
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.graphs.progress import silent


def test_without_counting_nothing_is_counted_and_afterwards_all_is_again() -> None:
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=64, prefix_cache=False, verify="off")
    llm = LLM(random_checkpoint("tiny", "auto"), device="emulated", options=options, progress=silent)
    driver, stats = EngineDriver(llm), llm.executor.runners["decode"].stats
    driver.seat([Prompts(llm.executor.vocab).one(5)], 20)
    driver.steady(3)
    replays, seconds = stats.replays.total(), driver.device_total
    assert replays
    assert seconds > 0
    with counters.uncounted():
        driver.steady(4)
    assert (stats.replays.total(), driver.device_total) == (replays, seconds)
    driver.steady(4)
    assert stats.replays.total() == replays + 4
    assert driver.device_total > seconds
    driver.drain()


def test_a_run_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["counters.py", "--device", "emulated", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", asked)
    counters.main()
    figures = json.loads((tmp_path / "counters_emulated.json").read_text())["figures"]
    alone = figures["alone, us"]
    whole = alone.pop("all of a replayed step")
    del alone["an eager step's reason instead of a replay"]
    assert whole == pytest.approx(sum(alone.values()), rel=0.01)
    assert figures["by difference: engine steps"].keys() == figures["by difference: Graphed calls"].keys()
    assert figures["apart"]["stats for the front, recordings"] > 0
