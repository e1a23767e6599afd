"""Steps and their results: each once, in order, and of one builder."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph import LLM, EmulatedDevice, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor, Launched
from phonograph.engine.execution.step_order import StepOrder, first_serial
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.readback import Picked, Readback
from phonograph.engine.passes.step import Step, Undone
from phonograph.engine.requests.request import Request
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.state.updates import TableUpdates
from phonograph.errors import StepOrderError
from phonograph.graphs.planning.settings import ask

_GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class Builder:
    """Serials as `StepBuilder` gives them."""

    def __init__(self) -> None:
        self.serial = self.last = first_serial()

    def build(self) -> Step:
        follows, self.serial = self.last, self.serial + 1
        self.last = self.serial
        return Step(1, "decode", serial=self.serial, follows=follows)

    def undone(self) -> Undone:
        return Undone(TableUpdates((), {}), self.last)


def collect(order: StepOrder, step: Step) -> None:
    """As an executor does."""
    if step.follows != order.collected:
        order.check_collect(step)
    order.collected = step.serial


@pytest.fixture
def order() -> StepOrder:
    return StepOrder()


def test_a_step_is_launched_once(order: StepOrder) -> None:
    builder = Builder()
    first, second = builder.build(), builder.build()
    order.take(first)
    with pytest.raises(StepOrderError, match=r"launching step 1 of its builder: step 1 .* was launched before"):
        order.take(first)
    order.take(second)
    for step in (first, second):
        with pytest.raises(StepOrderError, match="step 2 of its builder was launched before"):
            order.take(step)


def test_no_step_is_left_out(order: StepOrder) -> None:
    builder = Builder()
    first, second, third = builder.build(), builder.build(), builder.build()
    with pytest.raises(StepOrderError, match="step 2 of its builder: the executor has steps of another"):
        order.take(second)
    order.take(first)
    with pytest.raises(StepOrderError, match=r"follows step 2 .* step 1 .* launched last.*give it up"):
        order.take(third)
    order.take(second)
    order.take(third)


def test_results_are_collected_once_and_in_launch_order(order: StepOrder) -> None:
    builder = Builder()
    first, second = builder.build(), builder.build()
    order.take(first)
    order.take(second)
    with pytest.raises(StepOrderError, match=r"collecting step 2 .* it follows step 1 .* step 0 .* collected last"):
        collect(order, second)
    collect(order, first)
    with pytest.raises(StepOrderError, match=r"collecting step 1 .* is collected already"):
        collect(order, first)
    collect(order, second)
    with pytest.raises(StepOrderError, match="step 2 of its builder is collected already"):
        collect(order, first)


def test_a_new_builder_takes_over_and_the_former_is_refused(order: StepOrder) -> None:
    old, new = Builder(), Builder()
    first, in_flight = old.build(), old.build()
    order.take(first)
    order.take(in_flight)
    collect(order, first)
    order.take(new.build())
    for call in (
        lambda: order.take(old.build()),
        lambda: collect(order, in_flight),
        lambda: order.check_put_back(old.undone()),
    ):
        with pytest.raises(StepOrderError, match=r"steps of another builder.*EngineCore"):
            call()
    order.take(new.build())


@pytest.mark.parametrize("arrived", [False, True])
@pytest.mark.parametrize("collected", [False, True])
def test_a_step_that_was_given_up_may_have_come_this_far(order: StepOrder, arrived: bool, collected: bool) -> None:
    builder = Builder()
    order.take(sure := builder.build())
    given_up = builder.build()
    if arrived:
        order.take(given_up)
    builder.last = sure.serial
    with pytest.raises(StepOrderError, match="Collect all steps before"):
        order.check_put_back(builder.undone())
    collect(order, sure)
    if arrived and collected:
        collect(order, given_up)  # and what it gave was lost on its way back
    order.check_put_back(builder.undone())
    order.take(again := builder.build())
    with pytest.raises(StepOrderError, match="launched before"):
        order.take(given_up)
    collect(order, again)
    order.take(builder.build())


def test_the_first_step_of_a_builder_may_be_given_up(order: StepOrder) -> None:
    order.take(Builder().build())
    builder = Builder()
    begin = builder.last
    builder.build()
    builder.last = begin
    order.check_put_back(builder.undone())
    order.take(builder.build())


def test_nothing_is_put_back_late(order: StepOrder) -> None:
    builder = Builder()
    order.take(first := builder.build())
    collect(order, first)
    late = builder.undone()
    order.take(second := builder.build())
    order.take(third := builder.build())
    collect(order, second)
    collect(order, third)
    with pytest.raises(StepOrderError, match=r"after step 1 .* up to step 3"):
        order.check_put_back(late)


@given(st.lists(st.sampled_from(["launch", "lose before", "lose after", "collect"]), max_size=40))
def test_whatever_is_given_up_what_counts_is_taken_in_order(moves: list[str]) -> None:
    order, builder, in_flight = StepOrder(), Builder(), list[Step]()
    for move in moves:
        if move == "collect":
            if in_flight:
                collect(order, in_flight.pop(0))
            continue
        before, step = builder.last, builder.build()
        if move != "lose before":
            order.take(step)
        if move == "launch":
            in_flight.append(step)
            continue
        builder.last = before
        while in_flight:
            collect(order, in_flight.pop(0))
        order.check_put_back(builder.undone())
    for step in in_flight:
        collect(order, step)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_only_the_order_of_building_is_taken(picked: list[int]) -> None:
    order, builder = StepOrder(), Builder()
    steps, expected = [builder.build() for _ in range(6)], count()
    following = next(expected)
    for place in picked:
        if place == following:
            order.take(steps[place])
            following = next(expected)
        else:
            with pytest.raises(StepOrderError):
                order.take(steps[place])


def test_results_that_were_overwritten_are_not_given() -> None:
    readback = Readback(EmulatedDevice(), 4, 2)
    first, second = (readback.start(Picked(torch.tensor([number]))) for number in (1, 2))
    assert first.wait().tokens == [1]
    third = readback.start(Picked(torch.tensor([3])))
    with pytest.raises(StepOrderError, match=r"overwritten.*max_ahead"):
        first.wait()
    assert (second.wait().tokens, third.wait().tokens) == ([2], [3])


# -- in an engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    options = EngineOptions(max_seqs=4, max_tokens=16, max_len=64, page_size=8, dtype=torch.float32, max_ahead=2)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options)


class Meddling:
    """An executor whose caller does something else than it should, once."""

    def __init__(self, inner: Executor, launch: Callable[[Executor, Step], Any]) -> None:
        self.inner, self._launch = inner, launch
        self.vocab, self.step_tables = inner.vocab, inner.step_tables
        self.collect, self.put_back, self.heartbeat = inner.collect, inner.put_back, inner.heartbeat

    def launch(self, step: Step) -> Launched:
        found = self._launch(self.inner, step)
        assert isinstance(found, Launched)
        return found


def served(llm: LLM, executor: Any) -> tuple[list[int], str]:
    core = EngineCore(Scheduler(llm.limits, prefix_cache=False), executor)
    (sequence,) = core.add(Request("a", (5, 9, 200, 3), _GREEDY))
    while not core.is_idle:
        core.step()
    core.scheduler.integrity()
    return sequence.outputs, sequence.error


@pytest.mark.faults
def test_a_step_that_is_sent_twice_is_refused_and_run_again(llm: LLM) -> None:
    right, _ = served(llm, llm.executor)
    numbers = [4]

    def twice(executor: Executor, step: Step) -> Launched:
        launched = executor.launch(step)
        if step.number in numbers:
            numbers.remove(step.number)
            return executor.launch(step)
        return launched

    assert served(llm, Meddling(llm.executor, twice)) == (right, "")
    assert not numbers


@pytest.mark.faults
def test_a_caller_that_sends_each_step_twice_fails_requests_by_name(llm: LLM) -> None:
    def twice(executor: Executor, step: Step) -> Launched:
        executor.launch(step)
        return executor.launch(step)

    found, error = served(llm, Meddling(llm.executor, twice))
    assert found == []
    assert "StepOrderError" in error
    assert "Launch each step once" in error


@pytest.mark.faults
def test_a_core_does_not_go_on_where_another_has_begun(llm: LLM) -> None:
    former = EngineCore(Scheduler(llm.limits), llm.executor)
    (sequence,) = former.add(Request("a", (5, 9, 200, 3), _GREEDY))
    while not former.is_idle:
        former.step()
    served(llm, llm.executor)
    (again,) = former.add(Request("b", (5, 9, 200, 3), _GREEDY))
    while not former.is_idle:
        former.step()
    assert len(sequence.outputs) == _GREEDY.max_tokens
    assert again.outputs == []
    assert "StepOrderError" in again.error
    assert "make a new EngineCore" in again.error


def test_the_engine_s_recordings_carry_nothing_that_a_step_must_compare() -> None:
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=64, page_size=8, dtype=torch.float32, verify="off")
    asked = [ask(f"{name}.backend", "full", origin="test") for name in ("decode", "prefill")]
    runners = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked).executor.runners
    for name in ("decode", "prefill"):
        assert runners[name].captured
        assert [runners[name].carried(key) for key in runners[name].captured] == [{}] * len(runners[name].captured)


def test_a_commit_that_raises_collects_nothing_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = served(llm, llm.executor)
    core = EngineCore(Scheduler(llm.limits, prefix_cache=False), llm.executor)
    (sequence,) = core.add(Request("a", (5, 9, 200, 3), _GREEDY))
    commit, interrupts = Scheduler.commit, [KeyboardInterrupt]

    def interrupted(scheduler: Scheduler, *args: Any) -> Any:
        if len(sequence.outputs) == 3 and interrupts:
            raise interrupts.pop()
        return commit(scheduler, *args)

    monkeypatch.setattr(Scheduler, "commit", interrupted)
    while not core.is_idle:
        try:
            core.step()
        except KeyboardInterrupt:
            continue
    assert not interrupts
    assert sequence.outputs == right
