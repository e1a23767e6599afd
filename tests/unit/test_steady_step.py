"""A steady step of an engine looks at no fact: facts of its own passes are looked at when verify runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from phonograph import LLM, EngineOptions
from phonograph.bench.engine_driver import EngineDriver
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.startup_verification import verify_recordings
from phonograph.engine.models.config import SHAPES
from phonograph.graphs.progress import silent
from phonograph.graphs.recording.fact import Fact
from phonograph.graphs.recording.fact_check import FactCheck
from phonograph.graphs.running.stale import StaleWatch


@pytest.fixture
def llm() -> LLM:
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=64)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, progress=silent)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> list[str]:
    """The calls of these methods from now on, which do what they did."""
    calls: list[str] = []

    def counting(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return usual(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    return calls


def test_no_step_looks_at_facts_and_verify_does(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = llm.executor
    serving = {name: runner for name, runner in executor.runners.items() if executor.passes[name].declared.serves}
    assert serving
    for runner in serving.values():
        assert runner.options.facts == "verify"
        assert runner.facts.facts, "they are known"
        assert not runner.stale.is_on
    assert executor.runners["idle"].options.facts == "off"
    asked = counted(monkeypatch, StaleWatch, "refusal", "find")
    looked = counted(monkeypatch, FactCheck, "check", "look", "find")
    of_one: list[Fact] = []
    monkeypatch.setattr(Fact, "differs", property(of_one.append))
    driver, stats = EngineDriver(llm), serving["decode"].stats
    driver.seat([[5, 9, 3], [7, 2]], 20)
    before = stats.replays.total()
    driver.steady(10)
    driver.drain()
    assert stats.replays.total() >= before + 10
    assert not stats.eager
    assert (asked, looked, of_one) == ([], [], [])
    verify_recordings(executor, "all", llm.reports, silent)
    assert "find" in looked
    assert of_one
