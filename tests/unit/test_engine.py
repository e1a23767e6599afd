"""The engine on a tiny random model: every setting, backend and batch gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph import Device, EmulatedDevice, Reason, RequestError, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM, EngineOptions
from phonograph.engine.models.config import SHAPES
from phonograph.engine.request import FinishReason, SamplingParams
from phonograph.graphs.config import ask

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117))]


def make(device: Device | str = "emulated", backend: str | None = None, **options: Any) -> LLM:
    settings = {"max_seqs": 4, "max_tokens": 32, "max_len": 96, "page_size": 8, "dtype": torch.float32, **options}
    asked = [ask(f"{p}.backend", backend, origin="test") for p in ("decode", "prefill")] if backend else []
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=EngineOptions(**settings), asked=asked)


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [done.tokens for done in llm.generate(prompts, params)]
    llm.core.scheduler.integrity()
    return found


def alone(device: Device | str) -> list[list[int]]:
    """Each prompt alone, nothing shared, nothing recorded: what everything else must equal."""
    llm = make(device, "disabled", max_seqs=1, max_tokens=64, prefix_cache=False, max_ahead=0)
    return [tokens(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def one_by_one() -> list[list[int]]:
    return alone("cpu")


@pytest.mark.parametrize("backend", ["disabled", "full", "breakable"])
def test_every_backend_gives_the_tokens_of_each_prompt_alone(device: Device, backend: str) -> None:
    llm = make(device, backend)
    assert tokens(llm) == alone(device)
    eager = sum(runner.stats.eager.total() for runner in llm.executor.runners.values())
    assert (eager == 0) == (backend != "disabled")


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"max_seqs": 2},
        {"page_size": 4},
        {"max_ahead": 0},
        {"max_ahead": 3},
        {"prefix_cache": False},
        {"cache_tokens": 104},  # sequences are preempted
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["disabled", "full", "breakable"])
def test_every_scheduler_setting_gives_the_same_tokens(
    options: dict[str, Any], backend: str, one_by_one: list[list[int]]
) -> None:
    assert tokens(make(EmulatedDevice(poison=True), backend, **options)) == one_by_one


def test_prefix_hits_equal_cold_runs() -> None:
    llm = make("cpu")
    shared = list(range(30, 60))
    cold = tokens(llm, [[*shared, 1], [*shared, 2]])
    warm = tokens(llm, [[*shared, 1], [*shared, 2]])
    assert warm == cold
    assert llm.core.scheduler.counts.prefix_hit_tokens > 0


def test_the_recordings_are_right(device: Device) -> None:
    llm = make(device, "full")
    for runner in llm.executor.runners.values():
        report = verify(runner, batches=1)
        assert report.ok, report


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=4, ignore_eos=True)
    llm = make("cpu")
    alone = tokens(llm, [PROMPTS[0]], params)[0]
    assert tokens(llm, PROMPTS, params)[0] == alone
    other = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    assert tokens(llm, [PROMPTS[0]], other)[0] != alone


def test_sampling_on_graphs_equals_sampling_without() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.3, top_k=50, min_p=0.01, seed=9, ignore_eos=True)
    assert tokens(make("emulated", "full"), PROMPTS, params) == tokens(make("cpu"), PROMPTS, params)


def test_n_completions_differ_and_come_in_order() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, n=3, ignore_eos=True)
    done = make("cpu").generate([PROMPTS[0], PROMPTS[1]], params)
    assert [(d.prompt, d.index) for d in done] == [(tuple(p), i) for p in PROMPTS[:2] for i in range(3)]
    assert len({tuple(d.tokens) for d in done[:3]}) == 3


def test_a_prompt_that_is_too_long_is_refused_and_nothing_is_lost(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    with pytest.raises(RequestError, match="96"):
        llm.generate([[1, 2], [3] * 200], GREEDY)
    assert tokens(llm) == one_by_one


def test_what_can_not_be_served_yet_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="logprobs"):
        make("cpu").generate([[1]], SamplingParams(logprobs=2))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="token 999 is not in the vocabulary of 256"):
        make("cpu").generate([[1, 999]], GREEDY)


def penalised(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **changes)


def test_penalties_and_bias_do_what_they_say(device: Device) -> None:
    llm = make(device, "full")
    assert tokens(llm, [PROMPTS[0]], penalised(logit_bias={7: 100.0})) == [[7] * 12]
    for changes in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        said = tokens(llm, [PROMPTS[3]], penalised(**changes))[0]
        assert len(set(said)) > len(set(tokens(llm, [PROMPTS[3]])[0])), changes
    said = tokens(llm, [PROMPTS[3]], penalised(repetition_penalty=100.0))[0]
    assert len(set(said)) == 12
    assert not set(said) & set(PROMPTS[3])
    assert llm.executor.runners["decode"].stats.eager[Reason.FEATURE_NOT_CAPTURED] > 0


def test_penalties_of_one_request_are_not_anothers(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    alone = tokens(llm, [PROMPTS[3]], penalised(presence_penalty=2.0))[0]
    sequences = {
        **llm._submit([tuple(PROMPTS[3])], penalised(presence_penalty=2.0)),
        **llm._submit([tuple(PROMPTS[0])], GREEDY),
    }
    for _ in llm._run(sequences):
        pass
    assert [reader.done.tokens for reader in sequences.values()] == [alone, one_by_one[0]]
    assert tokens(llm, [PROMPTS[3]])[0] == one_by_one[3]  # the row is neutral again


def test_penalties_survive_preemption() -> None:
    params = penalised(presence_penalty=2.0, repetition_penalty=1.5)
    assert tokens(make("cpu", cache_tokens=104), PROMPTS, params) == tokens(make("cpu"), PROMPTS, params)


def test_a_request_that_raises_inside_the_model_fails_alone(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    decode = llm.executor.runners["decode"].phase.body

    def poisoned(batch: Any) -> torch.Tensor:
        if bool((llm.executor.tables.last_token[batch.rows] == victim_token).any()):
            raise ArithmeticError("this one")
        result: torch.Tensor = decode(batch)
        return result

    victim_token = one_by_one[1][3]
    assert all(victim_token not in one for i, one in enumerate(one_by_one) if i != 1)
    object.__setattr__(llm.executor.runners["decode"].phase, "body", poisoned)
    done = llm.generate(PROMPTS[:4], GREEDY)
    assert done[1].finish is FinishReason.ERROR
    assert "this one" in done[1].error
    assert [d.tokens for i, d in enumerate(done) if i != 1] == [one_by_one[i] for i in (0, 2, 3)]
    llm.core.scheduler.integrity()


def test_a_reader_that_stops_listening_gives_its_pages_back() -> None:
    llm = make("cpu")
    stream = llm._run(llm._submit([tuple(PROMPTS[2])], GREEDY))
    next(stream)
    stream.close()
    assert llm.core.is_idle
    llm.core.scheduler.integrity()
