"""Widths of rounds: narrow ones, wide ones and plain steps in turn say what plain decoding says, all on recordings."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafted import GREEDY, PROMPTS, REQUESTS
from phonograph import LLM, EngineOptions, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.registry import TARGET_VERIFY
from phonograph.engine.requests.limits import half_width
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.step_width import Planned, WherePaid
from speculation import MAX_LEN, Driver, Switching, check, oracle, plain, speculating

SLOW = pytest.mark.slow


def test_half_as_many_drafts() -> None:
    assert [half_width(width) for width in range(1, 9)] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "backend", ["disabled", *(pytest.param(one, marks=SLOW) for one in ("full", "breakable", "tc_piecewise"))]
)
@pytest.mark.parametrize("depth", [3, 4])
def test_widths_in_turn(backend: str, depth: int) -> None:
    core = speculating(oracle(depth, 20), backend, narrows=True)
    core.scheduler.width = Switching((1, half_width(depth + 1), depth + 1, half_width(depth + 1)))
    driver = Driver(core)
    check(driver.run(REQUESTS))
    check(driver.run(REQUESTS[::-1]))
    assert core.speculation.counts.accepted[0] > core.speculation.counts.accepted[-1] > 0
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())
        replayed = " ".join(f"[{key.axes}]" for key in core.executor.runners[TARGET_VERIFY.name].stats.replays)
        assert "drafts=half" in replayed
        assert "drafts=off" in replayed
        assert re.search(r"\[((?!drafts).)*\]", replayed), "whole rounds"


@SLOW
def test_recordings_of_narrow_rounds_are_right() -> None:
    core = speculating(ngram(3), narrows=True)
    report = verify(core.executor.runners[TARGET_VERIFY.name], batches=1)
    assert report.ok, report


def test_after_a_narrow_round_deeper_places_have_no_draft() -> None:
    core = speculating(oracle(3, 0), "disabled", max_ahead=0, narrows=True)
    core.scheduler.width = Switching((2,))
    [sequence] = core.add(Request("a", PROMPTS[0], GREEDY))
    for _ in range(3):
        core.step()
    drafts = core.executor.tables["draft"][sequence.row].tolist()
    said = plain(PROMPTS[0], GREEDY).tokens
    assert drafts == [said[len(sequence.outputs)], -1, -1]
    before = core.speculation.counts.rounds
    core.scheduler.width = Switching((4,))
    core.step()
    assert core.speculation.counts.rounds == before + 1
    assert sum(core.speculation.counts.drafted) == before + 1, "a wide round after it has one draft to verify"


@SLOW
def test_a_steady_narrow_round_is_one_launch_and_no_copy() -> None:
    core = speculating(oracle(3, 60), reserve_tokens=MAX_LEN, narrows=True)
    core.scheduler.width = Switching((2,))
    runner, tables = core.executor.runners[TARGET_VERIFY.name], core.executor.tables
    sequences = [
        core.add(Request(f"{n}", prompt, replace(GREEDY, max_tokens=70)))[0] for n, prompt in enumerate(PROMPTS[:2])
    ]
    for _ in range(6):
        core.step()
    before = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    for _ in range(15):
        core.step()
    after = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    assert after == (*before[:2], before[2] + 15)
    while not core.is_idle:
        core.step()
    check(sequences)


def test_where_deep_drafts_are_wrong_rounds_are_narrow() -> None:
    """The first draft of a round is right, the others never: by the costs of a wide round plain steps would win."""
    core = speculating(oracle(3, 0), "disabled", max_ahead=1, prefix_cache=False, narrows=True)
    costs = StepCosts((4,), {4: (2.5,), 2: (1.2,)})
    widths, policy = list[int](), WherePaid(core.scheduler.limits, costs)
    core.scheduler.width = policy
    tables, of = core.executor.tables, policy.of

    def noting(decodes: Any, prompts: Any = ()) -> Planned:
        tables["draft"][:, 1:] = 0
        found = of(decodes, prompts)
        widths.extend([found.width] if decodes else [])
        return found

    policy.of = noting  # type: ignore[method-assign]
    for _ in range(3):
        check(Driver(core).run(REQUESTS[:4]))
    assert widths.count(2) > 0.8 * len(widths), widths


@SLOW
def test_an_engine_where_rounds_must_pay_records_and_times_narrow_ones() -> None:
    options = EngineOptions(
        max_seqs=2, max_tokens=32, max_len=MAX_LEN, page_size=8, dtype=torch.float32,
        speculate="ngram", speculate_depth=3, speculate_when="pays",
    )  # fmt: skip
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options)
    why = "that takes 4 sequences at once, and 2 may run"
    assert re.search(rf"by rows: 4 tokens .*× at 2; 2 tokens .*× at 2; not timed among prompts: {why}\)", llm.explain())
    found = llm.generate(PROMPTS, GREEDY)
    assert [tuple(one.tokens) for one in found] == [plain(prompt, GREEDY).tokens for prompt in PROMPTS]
