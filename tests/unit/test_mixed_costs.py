"""Mixed costs: whole steps with prompts are timed before the first request, and leave nothing behind."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_head import write_random_head

from drafted import GREEDY, PROMPTS, REQUESTS
from drafters import engine, every_drafter, made
from mixed_steps import DEPTH
from phonograph import LLM, EngineOptions
from phonograph.engine import mixed_costs
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.mixed_costs import with_prompts
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.registry import HEARTBEAT, PREFILL
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.limits import half_width
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import WherePaid
from speculation import MAX_LEN, Driver, check, oracle, plain, speculating

SLOW = pytest.mark.slow
MOST, HALF = DEPTH + 1, half_width(DEPTH + 1)
COSTS = StepCosts((1, 2, 4, 8), {MOST: (1.5,) * 4, HALF: (1.2,) * 4}, (0.2,) * 4, (1e-3, 1e-3, 2e-3, 4e-3))
ROOM: dict[str, Any] = {"max_seqs": 8, "max_tokens": 8 * MOST + 16, "num_pages": 120}


@pytest.fixture
def drafting(request: pytest.FixtureRequest, tmp_path: Path) -> Drafting:
    return made(request.param, tmp_path)


def rehearsed(core: EngineCore[Executor], costs: StepCosts = COSTS) -> StepCosts:
    """Before the first request, as an engine does it; the core that serves begins after it."""
    return with_prompts(costs, core.executor, core.scheduler.passes)


def serving(core: EngineCore[Executor]) -> EngineCore[Executor]:
    """A core on the executor of another one."""
    return EngineCore(Scheduler(core.scheduler.limits, passes=core.scheduler.passes), core.executor)


@every_drafter
@pytest.mark.parametrize("backend", ["full", *(pytest.param(one, marks=SLOW) for one in ("breakable", "disabled"))])
def test_what_follows_is_as_if_nothing_had_run(drafting: Drafting, backend: str) -> None:
    """Tokens, pages, counts: those of the requests that come are all that there is."""
    core = engine(drafting, backend, narrows=True, **ROOM)
    costs = rehearsed(core)
    assert {width: len(longer) for width, longer in costs.among_prompts.items()} == {MOST: 4, HALF: 4}
    assert all(extra >= 0 for longer in costs.among_prompts.values() for extra in longer)
    executor = core.executor
    assert all(not runner.stats.replays and not runner.stats.eager.total() for runner in executor.runners.values())
    assert executor.timing.passes == {}
    core = serving(core)
    core.scheduler.width = WherePaid(core.scheduler.limits, costs)
    check(Driver(core).run(REQUESTS))
    check(Driver(core).run(REQUESTS[::-1]))


def test_which_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each width, with the fewest rows and with as many as leave room for prompts; each with a prompt that ends."""
    monkeypatch.setattr(mixed_costs, "_ENOUGH", math.inf)
    core = speculating(oracle(DEPTH, 0), narrows=True, max_ahead=1, **ROOM)
    launch, steps = core.executor.launch, list[Step]()

    def noting(step: Step) -> Any:
        steps.append(step)
        return launch(step)

    core.executor.launch = noting  # type: ignore[method-assign]
    rehearsed(core)
    mixed = [step for step in steps if step.decodes.rows.size and step.prefills]
    timed = Counter((step.tokens_per_row, len(step.decodes.rows)) for step in mixed)
    assert {key for key, count in timed.items() if count > 17} == {
        (w, rows) for w in (1, HALF, MOST) for rows in (1, 5)
    }
    assert all(sum(one.samples for one in step.prefills) == 1 for step in mixed)
    assert len({len(one.tokens) for step in mixed for one in step.prefills}) > 4, "they fall into several recordings"
    assert len(steps) < 6 * 40, "a start takes seconds as it is"


def test_what_the_host_does_for_rounds_is_in_it() -> None:
    """An executor that takes 40 ms for each row in a round among prompts, and none for the others."""
    core = speculating(oracle(DEPTH, 0), "disabled", max_ahead=1, narrows=True, **ROOM)
    launch = core.executor.launch

    def slow(step: Step) -> Any:
        if step.prefills and step.tokens_per_row == MOST:
            time.sleep(0.04 * len(step.decodes.rows))
        return launch(step)

    core.executor.launch = slow  # type: ignore[method-assign]
    found = rehearsed(core).among_prompts
    seconds = [extra * plain for extra, plain in zip(found[MOST], COSTS.plain_seconds, strict=True)]
    assert seconds == pytest.approx([0.04, 0.08, 0.16, 0.2], rel=0.4), "those between are on a line; of 8 rows, 5 fit"
    assert max(found[HALF]) * 4e-3 < 0.02


def test_a_host_that_is_slow_for_a_while_makes_no_width_look_cheap() -> None:
    """Nor dear: of several looks the shortest counts, and a width is not looked at several times on end."""
    core = speculating(oracle(DEPTH, 0), "disabled", max_ahead=1, narrows=True, **ROOM)
    launch, slow = core.executor.launch, iter([0.0] * 22 + [0.1] * 20)  # plain steps of one row among these

    def slowed(step: Step) -> Any:
        time.sleep(next(slow, 0.0) + 0.05 * (step.tokens_per_row == MOST and bool(step.prefills)))
        return launch(step)

    core.executor.launch = slowed  # type: ignore[method-assign]
    found = rehearsed(core).among_prompts
    seconds = [extra * plain for extra, plain in zip(found[MOST], COSTS.plain_seconds, strict=True)]
    assert seconds == pytest.approx([0.05] * 4, rel=0.5)
    assert max(found[HALF]) * 4e-3 < 0.025


def test_a_slow_engine_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_costs, "_ENOUGH", 0.0)
    core = speculating(oracle(DEPTH, 0), "disabled", narrows=True, max_ahead=1, **ROOM)
    launch, count, shown = core.executor.launch, iter(range(10**6)), list[tuple[int, int]]()

    def counting(step: Step) -> Any:
        next(count)
        return launch(step)

    core.executor.launch = counting  # type: ignore[method-assign]
    costs = with_prompts(
        COSTS, core.executor, core.scheduler.passes, lambda doing, done, total: shown.append((done, total))
    )
    assert costs.among_prompts
    assert next(count) < 12 * 14
    assert shown == [(0, 6), (1, 6), (2, 6), (3, 6), (6, 6)], "a line that is drawn ends"


def test_rows_that_are_not_steady_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Here, all that the limits allow: there are no pages for so many. What a few rows take is known all the same."""
    core = speculating(oracle(DEPTH, 0), "disabled", narrows=True, max_ahead=1, **{**ROOM, "num_pages": 24})
    with caplog.at_level("INFO", logger="phonograph"):
        costs = rehearsed(core)
    found = costs.among_prompts
    assert "not measured with 5 rows" in caplog.text
    assert costs.among_rows == (1,)
    assert len(found[MOST]) == len(COSTS.sizes)
    assert len(set(np.array(found[MOST]) * COSTS.plain_seconds)) == 1, "as with one row"
    check(Driver(serving(core)).run(REQUESTS))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_seqs": 4}, "that takes 5 sequences at once, and 4 may run"),
        ({"max_len": 24}, "had all rows and a prompt"),
        ({"num_pages": 14}, "had all rows and a prompt"),
    ],
)
def test_where_steps_are_not_steady_nothing_is_said(
    changes: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that leave no room, end, or are preempted: rounds among prompts then go by those without."""
    core = speculating(oracle(DEPTH, 0), "disabled", narrows=True, **{**ROOM, "max_ahead": 2, **changes})
    with caplog.at_level("INFO", logger="phonograph"):
        costs = rehearsed(core)
    assert not costs.among_prompts
    assert costs.untimed
    assert str(costs).endswith(f"; not timed among prompts: {costs.untimed}")
    assert f"what rounds cost among prompts was not measured: {costs.untimed}" in caplog.text
    assert told in caplog.text


@pytest.mark.faults
@pytest.mark.parametrize("num_failed", [1, 10**6])
def test_a_step_that_raises_costs_the_measurement_alone(num_failed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also one alone: its rows would be tried one by one, and the time of that is no step's."""
    core = speculating(oracle(DEPTH, 20), "disabled", narrows=True, **ROOM)
    executor, launch, number = core.executor, core.executor.launch, iter(range(10**6))

    def failing(step: Step) -> Any:
        if 25 < next(number) <= 25 + num_failed:
            raise RuntimeError("no memory")
        return launch(step)

    executor.launch = failing  # type: ignore[method-assign]
    assert rehearsed(core) == replace(COSTS, untimed="RuntimeError: no memory")
    assert "what rounds cost among prompts was not measured: RuntimeError: no memory" in caplog.text
    assert next(number) == 27, "none is launched after it"
    assert "one by one" not in caplog.text, "nor told of"
    executor.launch = launch  # type: ignore[method-assign]
    check(Driver(serving(core)).run(REQUESTS))


@pytest.mark.faults
def test_a_device_that_is_gone_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing of the rehearsal, whoever goes on with the executor."""
    core = speculating(oracle(DEPTH, 20), "disabled", narrows=True, **ROOM)
    executor = core.executor
    executor.shadow = shadow = object()  # type: ignore[assignment]
    synchronize = type(executor.device).synchronize

    def gone(*args: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(type(executor.device), "synchronize", gone)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rehearsed(core)
    assert executor.shadow is shadow
    serving_stats = [runner.stats for name, runner in executor.runners.items() if name != HEARTBEAT.name]
    assert all(not stats.replays and not stats.eager.total() for stats in serving_stats)
    assert executor.timing.passes == {}
    executor.shadow = None
    monkeypatch.setattr(type(executor.device), "synchronize", synchronize)
    check(Driver(serving(core)).run(REQUESTS))


def test_a_ctrl_c_ends_it() -> None:
    core = speculating(oracle(DEPTH, 0), "disabled", narrows=True, **ROOM)

    def interrupted(step: Step) -> Any:
        raise KeyboardInterrupt

    core.executor.launch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rehearsed(core)


@pytest.mark.parametrize("mixed", [True, False])
def test_an_engine_says_what_rounds_cost_among_prompts(
    mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And checks in service look at no step before the first request."""
    write_random_head(tmp_path, SHAPES["tiny"], 100, torch.float32)
    options = EngineOptions(
        max_seqs=6, max_tokens=64, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate="eagle",
        draft=tmp_path, speculate_when="pays", mixed=mixed, shadow_verify=1.0, verify="off",
    )  # fmt: skip
    shown = list[tuple[str, int, int]]()
    monkeypatch.setattr(mixed_costs, "_STEPS", 2)
    monkeypatch.setattr(mixed_costs, "_ENOUGH", math.inf)
    llm = LLM(
        RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, progress=lambda *args: shown.append(args)
    )
    assert ("among prompts, in plain steps: 4 tokens +" in llm.explain()) == mixed
    assert ("not timed among prompts: they have steps of their own" in llm.explain()) != mixed
    told = [one[1:] for one in shown if one[0] == "timing rounds among prompts"]
    assert told == [(done, 6) for done in range(7)] * mixed, "three looks at two numbers of rows"
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_checked == 0
    found = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)
    assert [tuple(one.tokens) for one in found] == [plain(prompt, GREEDY).tokens for prompt in PROMPTS]
    assert llm.executor.runners[PREFILL.name].stats.replays.total()
    assert llm.executor.shadow.num_checked
