"""A pass that keeps a second group of layers on the pages of the first, as a drafter's model does.

The second model is the target itself, over a cache of its own; tokens are picked from what it says. So prefix hits,
preemption and eviction must carry its pages along, or its answers change.

Files of the package that it touches: none. As part of the package, a drafter's group is the field `keeps` of its pass's
declaration in engine/passes/registry.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph import LLM, EmulatedDevice, EngineOptions, SamplingParams, verify
from phonograph.engine.cache.groups import CacheGroup, page_bytes
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.chain import chained
from phonograph.engine.passes.decode import DecodeBatch, decode_pass
from phonograph.engine.passes.prefill import prefill_pass
from phonograph.engine.passes.prefill_batch import PrefillBatch
from phonograph.engine.passes.registry import DECODE, HEARTBEAT, PHASES, PREFILL, kept_by
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import Request
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.running.runner_options import facts_of

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61)), (*range(20, 50), 4), (11,) * 9, tuple(range(100, 117))]


def second(parts: PassParts) -> PassParts:
    """The same engine, as the layers of the second group see it."""
    return replace(parts, cache=parts.beside[DECODE.name])


def twice_decoded(parts: PassParts, backend: str) -> Pass:
    """Both say the same, or token 0 is told; the tables advance once, by what the second one says."""
    queries = decode_pass(parts)

    def first(batch: DecodeBatch) -> torch.Tensor:
        with parts.tables.kept(parts.limits.max_seqs):
            return queries.body(batch).tokens

    def then(batch: DecodeBatch, tokens: torch.Tensor) -> Any:
        picked = decode_pass(second(parts)).body(batch)
        return picked._replace(tokens=torch.where(picked.tokens == tokens, picked.tokens, 0))

    return chained(TWICE_DECODED, replace(queries, body=first), replace(queries, body=then))


def twice_prefilled(parts: PassParts, backend: str) -> Pass:
    one, other = prefill_pass(parts, backend), prefill_pass(second(parts), backend)

    def then(batch: PrefillBatch, _hidden: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = other.body(batch)
        return again

    return chained(TWICE_PREFILLED, replace(one, tail=None), replace(other, body=then))


TWICE_DECODED = replace(DECODE, make=twice_decoded, keeps=lambda model: model.keeps)
TWICE_PREFILLED = replace(PREFILL, make=twice_prefilled)
TWICE = (TWICE_DECODED, TWICE_PREFILLED, HEARTBEAT)


@pytest.fixture(scope="module")
def llm() -> LLM:
    options = EngineOptions(
        max_seqs=1, max_tokens=64, max_len=96, page_size=8, dtype=torch.float32,
        attention="reference", kernels="reference", prefix_cache=False,
    )  # fmt: skip
    asked = [ask(f"{phase.name}.backend", "disabled", origin="test") for phase in PHASES]
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)


def engine(llm: LLM, backend: str, num_pages: int) -> EngineCore[Executor]:
    limits = Limits(max_seqs=4, max_tokens=32, max_len=96, page_size=8, num_pages=num_pages, reserve_tokens=0)
    device = EmulatedDevice(poison=True)
    asked = [ask(f"{one.name}.backend", backend, origin="test") for one in TWICE]
    executor = Executor(
        llm.executor.model, TorchSampler(), device, resolve(asked, facts_of(device), PHASES), limits, passes=TWICE
    )
    executor.capture()
    return EngineCore(Scheduler(limits), executor)


def run(core: EngineCore[Executor]) -> list[list[int]]:
    sequences = [core.add(Request(str(prompt), prompt, GREEDY))[0] for prompt in PROMPTS]
    while not core.is_idle:
        core.step()
    core.scheduler.integrity()
    return [sequence.outputs for sequence in sequences]


@pytest.mark.parametrize("num_pages", [60, 16])
@pytest.mark.parametrize("backend", ["disabled", "full", "breakable"])
def test_prefix_hits_and_preemption_carry_both_groups_along(llm: LLM, backend: str, num_pages: int) -> None:
    wanted = [llm.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]
    core = engine(llm, backend, num_pages)
    assert run(core) == wanted
    assert run(core) == wanted
    counts = core.scheduler.counts
    assert counts.prefix_hit_tokens > 0
    assert (counts.preemptions > 0) == (num_pages == 16)
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


def test_the_recordings_are_right_and_trials_keep_both_groups(llm: LLM) -> None:
    core = engine(llm, "full", 60)
    wanted = run(core)
    for runner in core.executor.runners.values():
        assert verify(runner, batches=1).ok
    assert run(core) == wanted, "what the prefix cache keeps is still there, in both"


def test_a_page_costs_what_both_groups_take(llm: LLM) -> None:
    model = llm.executor.model
    one, both = (page_bytes(kept_by(model, passes), 8, model.dtype) for passes in ((DECODE, PREFILL), TWICE))
    group = CacheGroup.empty(model.keeps, 10, 8, dtype=model.dtype, device=torch.device("cpu"))
    beside = group.beside(model.keeps)
    assert both == 2 * one == sum(tensor.nbytes for tensor in (*group.tensors, *beside.tensors)) // 10
