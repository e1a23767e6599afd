"""A toy family with recurrent state, which only this test has: a decaying sum of embeddings, added to them.

The state is a column that passes alone write, reset on the device when a row gets a new owner. Files of the package
that it touches: none. As part of the package it would touch one beside its own: its line in engine/models/registry.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from phonograph import LLM, Device, EngineOptions, PlanError, SamplingParams, verify
from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.cache.prefix_cache import STATE_BY_ROW
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models import dense
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.interface import Hidden, ModelParts
from phonograph.engine.models.registry import ARCHITECTURES, Architecture
from phonograph.engine.models.value_range import value_range
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import Queries
from phonograph.engine.requests.request import Request
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.state.column import Column, Form, TrialRows, Writer
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.slow

DECAY = 0.75
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117)), list(range(20, 61))]
CONFIG = replace(SHAPES["tiny"], architecture="RecurrentForCausalLM")


@dataclass(frozen=True)
class Recurrent(Decoder):
    """The dense decoder over embeddings that remember: s[t] = decay * s[t - 1] + x[t]; the layers get x + s."""

    @property
    def columns(self) -> tuple[Column, ...]:
        width = self.config.hidden

        def trial(rows: TrialRows) -> torch.Tensor:
            return torch.randn(rows.count, width, generator=rows.numbers)

        return (Column("memory", torch.float32, width=width, writer=Writer.GRAPH, form=Form.RESET, trial=trial),)

    def hidden(
        self,
        inputs: torch.Tensor,
        queries: Queries,
        cache: CacheGroup,
        wanted: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        memory, rows, places = cache.by_row["memory"], queries.rows, queries.token_positions
        x = functional.embedding(inputs[rows] if queries.by_row else inputs, self.weights.embedding)
        same, ages = rows[:, None] == rows, places[:, None] - places
        first = torch.where(same, places, places.max()).amin(1)
        weights = torch.where(same & (ages >= 0), DECAY ** ages.clamp_min(0).to(x.dtype), 0.0)
        state = weights @ x + DECAY ** (places - first + 1).to(x.dtype)[:, None] * memory[rows]
        # Each token writes what the last one of its row leaves; padding leaves nothing.
        last = torch.where(same, places, -1).argmax(1)
        memory.index_put_((rows,), state[last] * (rows > 0)[:, None])
        return super().hidden(x + state, queries, cache, wanted, taps)


def build(config: ModelConfig, weights: Any, parts: ModelParts) -> Recurrent:
    made = dense.build(config, weights, parts)
    return Recurrent(made.config, made.weights, made.attention, made.kernels, made.rope, made.residual)


class Family:
    """The protocol of that name; only how a model is built is its own."""

    config_from_hf = staticmethod(dense.config_from_hf)
    config_from_gguf = staticmethod(dense.config_from_gguf)
    tensors = staticmethod(dense.tensors)
    build = staticmethod(build)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "RecurrentForCausalLM", Architecture(Family(), "recurrent", keeps_state=True))


def make(device: Device | str, backend: str | None = None, **changes: Any) -> LLM:
    settings = {"max_seqs": 3, "max_tokens": 16, "max_len": 96, "page_size": 8, "dtype": torch.float32, **changes}
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")] if backend else []
    return LLM(RandomCheckpoint(CONFIG), device=device, options=EngineOptions(**settings), asked=asked)


def by_hand(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """All tokens anew for each token, over a memory that is empty, in one pass."""
    parts = ReferenceAttention(), ReferenceKernels()
    assert isinstance(llm.executor.model, Recurrent)
    model, known = llm.executor.model.with_attention(parts[0]).with_kernels(parts[1]), list(prompt)
    table = torch.stack([torch.zeros(12), torch.arange(1, 13)]).int()
    with torch.inference_mode():
        for _ in range(count):
            cache = CacheGroup.empty(model.keeps, 13, 8, dtype=model.dtype, device=torch.device("cpu"))
            cache = replace(cache, by_row={"memory": torch.zeros(2, model.config.hidden)})
            places = torch.arange(len(known))
            queries = Queries(torch.ones_like(places), places, table, tokens_per_row=None)
            known.append(int(model.logits(model.hidden(torch.tensor(known), queries, cache).states)[-1].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("changes", [{}, {"max_ahead": 3}, {"mixed": False}, {"max_tokens": 5}], ids=str)
@pytest.mark.parametrize("backend", [None, "disabled", "full", "breakable"])
def test_tokens_are_those_of_one_pass_over_all(backend: str | None, changes: dict[str, Any]) -> None:
    """Chunks, mixed steps, rows with a former owner, equal prompts: the state goes with its sequence."""
    llm = make("cpu" if backend is None else "emulated", backend, **changes)
    wanted = [by_hand(llm, prompt, 12) for prompt in PROMPTS]
    for _ in range(2):
        assert [done.tokens for done in llm.generate(PROMPTS, GREEDY)] == wanted
    llm.core.scheduler.integrity()
    counts = llm.core.scheduler.counts
    assert counts.prefix_hit_tokens == 0
    if backend in ("full", "breakable"):
        assert all(runner.stats.eager.total() == 0 for runner in llm.executor.runners.values())


def test_a_sequence_that_was_preempted_begins_with_an_empty_memory() -> None:
    llm = make("cpu", cache_tokens=96)
    scheduler = Scheduler(replace(llm.limits, reserve_tokens=0), prefix_cache=False)
    core = EngineCore(scheduler, llm.executor)
    sequences = [core.add(Request(str(i), tuple(prompt), GREEDY))[0] for i, prompt in enumerate(PROMPTS)]
    while not core.is_idle:
        core.step()
    assert scheduler.counts.preemptions > 0
    assert [one.outputs for one in sequences] == [by_hand(llm, prompt, 12) for prompt in PROMPTS]


def test_the_memory_matters() -> None:
    plain = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=EngineOptions(max_len=96, dtype=torch.float32))
    assert plain.generate(PROMPTS[:1], GREEDY)[0].tokens != make("cpu").generate(PROMPTS[:1], GREEDY)[0].tokens


def test_the_recordings_are_right() -> None:
    llm = make("emulated", "full")
    before = [done.tokens for done in llm.generate(PROMPTS, GREEDY)]
    for runner in llm.executor.runners.values():
        report = verify(runner, batches=1)
        assert report.ok, report
    assert [done.tokens for done in llm.generate(PROMPTS, GREEDY)] == before


def test_what_the_state_excludes_is_named() -> None:
    llm = make("cpu")
    assert not llm.prefix_sharing.is_on
    assert "state by row (memory)" in llm.explain()
    assert STATE_BY_ROW in llm.explain()
    asked_off = make("cpu", prefix_cache=False)
    assert "prefix cache: off: as requested" in asked_off.explain()
    limits = replace(llm.limits, tokens_per_row=3)
    with pytest.raises(PlanError, match=r"keeps state by row \(memory\).*tokens_per_row is 3"):
        Executor(llm.executor.model, TorchSampler(), llm.device, llm.plan, limits)
    assert value_range(llm.executor.model, llm.device).largest > 0


@pytest.mark.parametrize("speculate", ["ngram", "auto"])
def test_speculation_is_refused_before_weights_are_read(speculate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr(RandomCheckpoint, "tensors", read)
    said = r"rule 'speculation-state-by-row' conflicts with --speculate \w+: RecurrentForCausalLM keeps state by row"
    with pytest.raises(PlanError, match=said):
        make("cpu", speculate=speculate)
    with pytest.raises(AssertionError, match="weights are read"):
        make("cpu")


@pytest.mark.faults
def test_what_can_t_be_put_back_fails_by_name() -> None:
    """After a step that raised, nobody knows what is in the memory: those that had some are told."""
    llm = make("cpu")
    phase, raised = llm.executor.runners["decode"].phase, list[int]()
    body = phase.body

    def once(batch: Any) -> Any:
        if not raised:
            raised.append(1)
            raise ArithmeticError("this once")
        return body(batch)

    object.__setattr__(phase, "body", once)
    (failed,) = llm.generate(PROMPTS[:1], GREEDY)
    assert "can't be restored" in failed.error
    assert llm.generate(PROMPTS[:1], GREEDY)[0].tokens == by_hand(llm, PROMPTS[0], 12)
