"""State after rounds: request tables and pages are those of a plain engine that got the same tokens one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafted import DRAWN, GREEDY, PENALISED, PROMPTS
from phonograph import EmulatedDevice, SamplingParams
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.passes.registry import PASSES
from phonograph.engine.requests.limits import Limits, half_width
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence, State
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.running.runner_options import facts_of
from speculation import MAX_LEN, Switching, Tokens, oracle, plain_llm, speculating

pytestmark = pytest.mark.slow

EVERY = tuple(replace(one, max_tokens=40) for one in (GREEDY, DRAWN, PENALISED, replace(PENALISED, temperature=0.0)))


@dataclass(frozen=True)
class RowState:
    """What an engine has of a sequence."""

    length: int
    last_token: int
    counts: torch.Tensor | None
    kept: list[torch.Tensor]
    """Keys and values of all tokens up to the length."""

    @staticmethod
    def of(core: EngineCore[Executor], sequence: Sequence) -> RowState:
        tables, row = core.executor.tables, sequence.row
        length = int(tables.length[row])
        pages = tables.pages[row, : -(-length // core.scheduler.limits.page_size)].tolist()
        assert pages == sequence.pages[: len(pages)], "the tables know the pages"
        kept = [tensor[:, pages].flatten(1, 2)[:, :length] for tensor in core.executor.cache.tensors]
        counts = tables["counts"][row].clone() if is_penalised(sequence.request.params) else None
        return RowState(length, int(tables.last_token[row]), counts, kept)


def is_penalised(params: SamplingParams) -> bool:
    """Nobody reads the counts of others, and what is in them depends on who shares a step."""
    return bool(params.frequency_penalty)


@cache
def plain_core() -> EngineCore[Executor]:
    """Decodes one token a step, nothing ahead of its commit."""
    limits = Limits(max_seqs=4, max_tokens=64, max_len=MAX_LEN, page_size=8, num_pages=60, max_ahead=0)
    device = EmulatedDevice()
    asked = [ask(f"{one.name}.backend", "disabled", origin="test") for one in PASSES]
    plan = resolve(asked, facts_of(device), [one.defaults for one in PASSES])
    executor = Executor(plain_llm().executor.model, TorchSampler(), device, plan, limits)
    executor.capture()
    return EngineCore(Scheduler(limits, prefix_cache=False), executor)


def expect_state(found: RowState, request: Request) -> None:
    """That of a plain engine once it has computed as many tokens."""
    core = plain_core()
    # It must not end where the other one does, or there would be nothing to look at.
    [sequence] = core.add(replace(request, id="plain", params=replace(request.params, max_tokens=50)))
    while not sequence.row or int(core.executor.tables.length[sequence.row]) < found.length:
        core.step()
        assert sequence.finish is None
    wanted = RowState.of(core, sequence)
    core.cancel("plain")
    while not core.is_idle:
        core.step()
    assert (found.length, found.last_token) == (wanted.length, wanted.last_token)
    for part, other in zip(found.kept, wanted.kept, strict=True):
        torch.testing.assert_close(part, other, atol=1e-5, rtol=1e-5)
    if found.counts is not None:
        assert wanted.counts is not None
        assert torch.equal(found.counts, wanted.counts)


def compared(core: EngineCore[Executor], requests: list[tuple[Tokens, SamplingParams]], moments: set[int]) -> int:
    """Runs these, and looks at every row that decodes after some of the steps; returns how many were looked at."""
    sequences, seen = list[Sequence](), 0
    for number, (prompt, params) in enumerate(requests):
        sequences += core.add(Request(f"{number}", prompt, params))
    for moment in range(500):
        core.step()
        for sequence in sequences if moment in moments else ():
            if sequence.state is State.RUNNING and sequence.row and not sequence.is_prefilling:
                # In flight or not: what is on the device is what launched rounds have accepted.
                expect_state(RowState.of(core, sequence), sequence.request)
                seen += 1
        if core.is_idle:
            break
    return seen


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_accept_pattern_leaves_what_single_tokens_leave(data: st.DataObject) -> None:
    depth, spoiled = data.draw(st.integers(1, 6), "depth"), data.draw(st.sampled_from((0, 10, 40, 80)), "spoiled")
    ahead = data.draw(st.integers(0, 3), "ahead")
    core = speculating(oracle(depth, spoiled), "disabled", max_ahead=ahead, narrows=True)
    if data.draw(st.booleans(), "switches"):
        widths = st.lists(st.sampled_from((1, half_width(depth + 1), depth + 1)), min_size=1, max_size=5)
        core.scheduler.width = Switching(data.draw(widths, "widths"))
    many = data.draw(st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(EVERY)), min_size=1, max_size=4))
    moments = data.draw(st.sets(st.integers(1, 12), min_size=2, max_size=4), "moments")
    compared(core, many, moments)


@pytest.mark.parametrize("spoiled", [10, 50])
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_replays_leave_what_single_tokens_leave(backend: str, spoiled: int) -> None:
    core = speculating(oracle(3, spoiled), backend)
    many = list(zip(PROMPTS[:4], EVERY, strict=True))
    assert compared(core, many, {2, 3, 5, 7, 9}) > 10
    assert core.speculation.counts.accepted[0] > core.speculation.counts.accepted[-1] > 0
    assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())
