"""Hidden states that requests ask for: those of transformers, in every kind of step, and nothing where nobody asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from phonograph import LLM, EngineOptions, RequestError, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.queries import Queries
from phonograph.engine.requests.hidden_states import states_of
from phonograph.engine.requests.request import Request
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.graphs.planning.settings import ask

pytestmark = pytest.mark.slow

MAX_LEN = 96
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 80)), (11,) * 9, tuple(range(20, 70))]


@cache
def llm_of(backend: str = "disabled", **changes: Any) -> LLM:
    usual: dict[str, Any] = {"max_seqs": 4, "max_tokens": 64, "max_len": MAX_LEN, "page_size": 8}
    options = EngineOptions(
        **{"dtype": torch.float32, "attention": "reference", "kernels": "reference", **usual, **changes}
    )
    names = ("target_verify" if "speculate" in changes else "decode", "prefill")
    asked = [ask(f"{name}.backend", backend, origin="test") for name in names]
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)


@torch.inference_mode()
def states(tokens: tuple[int, ...]) -> torch.Tensor:
    """Of a whole sequence, by the model in one pass."""
    llm = llm_of()
    count, pages = len(tokens), torch.arange(1, 14)[None].repeat(2, 1)
    queries = Queries(torch.ones(count).long(), torch.arange(count), pages, tokens_per_row=None)
    return llm.executor.model.hidden(torch.tensor(tokens), queries, llm.executor.cache).states.float()


def check(llm: LLM, params: SamplingParams) -> None:
    for done in llm.generate(PROMPTS, params):
        whole = states((*done.prompt, *done.tokens[:-1]))
        wanted = whole if params.return_hidden_states == "all" else whole[len(done.prompt) - 1 :]
        assert done.hidden_states is not None
        assert done.hidden_states.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(done.hidden_states), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("asked", ["last", "all"])
@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("disabled", {}),
        ("full", {}),
        ("breakable", {}),
        ("disabled", {"speculate": "ngram"}),
        ("full", {"speculate": "ngram"}),
        ("disabled", {"embeddings": True}),
    ],
    ids=str,
)
def test_they_are_those_of_the_model_over_the_whole_sequence(backend: str, changes: dict[str, Any], asked: Any) -> None:
    """In chunks, among others, in rounds, and after prefix hits."""
    llm = llm_of(backend, return_hidden_states=True, **changes)
    for _ in range(2):
        check(llm, replace(GREEDY, return_hidden_states=asked))
    check(llm, replace(GREEDY, return_hidden_states=asked, temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1))
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in llm.executor.runners.values())


@pytest.mark.parametrize("asked", ["last", "all"])
def test_after_preemptions_they_are_the_same(asked: Any) -> None:
    llm = llm_of.__wrapped__(return_hidden_states=True, cache_tokens=96, prefix_cache=False, page_size=4)
    scheduler = Scheduler(replace(llm.limits, reserve_tokens=0), prefix_cache=False)
    core, params = EngineCore(scheduler, llm.executor), replace(GREEDY, max_tokens=30, return_hidden_states=asked)
    sequences = [core.add(Request(f"{n}", tuple(range(n, n + 12)), params))[0] for n in range(5, 9)]
    while not core.is_idle:
        core.step()
    assert scheduler.counts.preemptions > 0
    for one in sequences:
        whole = states((*one.request.prompt, *one.outputs[:-1]))
        found = states_of(one, one.prompt_states, len(one.outputs))
        assert found is not None
        wanted = whole if asked == "all" else whole[one.num_prompt - 1 :]
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)
        scheduler.integrity()


def test_a_prompt_alone() -> None:
    llm = llm_of(return_hidden_states=True)
    for asked, count in (("all", 60), ("last", 0)):
        [done] = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=0, return_hidden_states=asked))  # type: ignore[arg-type]
        assert done.hidden_states is not None
        assert done.hidden_states.shape[0] == count
        if count:
            torch.testing.assert_close(torch.from_numpy(done.hidden_states), states(PROMPTS[2]), atol=1e-4, rtol=1e-4)


def test_every_choice_has_those_of_the_prompt() -> None:
    llm = llm_of(return_hidden_states=True)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=3, return_hidden_states="all", ignore_eos=True)
    found = llm.generate([PROMPTS[2]], params)
    assert len({tuple(one.tokens) for one in found}) > 1
    for done in found:
        wanted = states((*done.prompt, *done.tokens[:-1]))
        assert done.hidden_states is not None
        torch.testing.assert_close(torch.from_numpy(done.hidden_states), wanted, atol=1e-4, rtol=1e-4)


def test_they_end_where_the_output_does() -> None:
    llm = llm_of(return_hidden_states=True)
    stop = llm.generate([PROMPTS[0]], GREEDY)[0].tokens[5]
    [done] = llm.generate([PROMPTS[0]], replace(GREEDY, stop_token_ids=(stop,), return_hidden_states="last"))
    assert done.hidden_states is not None
    assert len(done.hidden_states) == len(done.tokens)


@pytest.mark.faults
def test_a_step_that_raises_is_run_again_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, launch, raised = llm_of(return_hidden_states=True), Executor.launch, list[int]()

    def failing(executor: Executor, step: Any) -> Any:
        launched = launch(executor, step)
        if len(step.decodes.rows) + len(step.prefills) > 1 and len(raised) < 4:
            raised.append(step.number)
            raise ValueError("it fell over")
        return launched

    monkeypatch.setattr(Executor, "launch", failing)
    check(llm, replace(GREEDY, return_hidden_states="all"))
    assert len(raised) == 4


def test_where_nobody_asks_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of other requests have the recordings, loads and results that they have in an engine without."""

    def counts(llm: LLM) -> Counter[str]:
        found = Counter[str]()
        for name, runner in llm.executor.runners.items():
            found[f"loads of {name}"] = runner.registry.counts.transfers
            found.update({str(key): count for key, count in runner.stats.replays.items()})
        return found

    plain, other = (llm_of("full", prefix_cache=False, return_hidden_states=given) for given in (False, True))
    found = list[Any]()
    for llm in (plain, other):
        blocks, host_block, before = list[int](), type(llm.device).host_block, counts(llm)

        def counted(device: Any, size: int, host_block: Any = host_block, blocks: list[int] = blocks) -> Any:
            blocks.append(size)
            return host_block(device, size)

        with monkeypatch.context() as patched:
            patched.setattr(type(llm.device), "host_block", counted)
            llm.generate(PROMPTS, GREEDY)
        found.append((counts(llm) - before, blocks))
    assert found[0] == found[1]
    assert found[0][0].total() > 10
    keys = [{str(key) for key in llm.executor.runners["decode"].captured} for llm in (plain, other)]
    assert not any("hidden_states" in key for key in keys[0])
    assert any("hidden_states=last" in key for key in keys[1])


def test_an_engine_that_gives_none_refuses() -> None:
    with pytest.raises(RequestError, match="Start it with --return-hidden-states") as caught:
        llm_of().generate([[1, 2]], SamplingParams(return_hidden_states="last"))
    assert caught.value.field == "return_hidden_states"
    with pytest.raises(RequestError, match="return_hidden_states is 'last' or 'all', or None"):
        SamplingParams(return_hidden_states=True)  # type: ignore[arg-type]
