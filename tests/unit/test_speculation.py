"""Speculation: rounds of verify and draft say what plain decoding says, whatever is drafted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph import LLM, EmulatedDevice, EngineOptions, RequestError, SamplingParams, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.registry import PREFILL, TARGET_VERIFY
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.step import ScheduledStep
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import WherePaid
from phonograph.graphs.planning.settings import ask
from speculation import MAX_LEN, Driver, Even, Switching, check, oracle, plain, saying, speculating

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_k=20, top_p=0.9, seed=3, ignore_eos=True)
PENALISED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, logprobs=3)
PENALISED_DRAWS = replace(DRAWN, frequency_penalty=1.5, logit_bias={7: 2.0, 9: -3.0}, min_p=0.01, logprobs=0)
EVERY = (GREEDY, DRAWN, PENALISED, PENALISED_DRAWS)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61)), (11,) * 9, tuple(range(100, 117)), (1, 2, 1, 2, 1)]
REQUESTS = [(prompt, EVERY[number % len(EVERY)]) for number, prompt in enumerate(PROMPTS * 2)]


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("full", {}),
        ("full", {"max_ahead": 3}),
        ("breakable", {"max_ahead": 1}),
        *(("disabled", changes) for changes in ({"max_ahead": 0}, {"max_ahead": 3}, {"mixed": False})),
    ],
    ids=str,
)
def test_output_is_that_of_plain_decoding(backend: str, changes: dict[str, Any]) -> None:
    core = speculating(ngram(3), backend, **changes)
    driver = Driver(core)
    check(driver.run(REQUESTS))
    check(driver.run(REQUESTS[::-1]))
    runners = core.executor.runners
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in runners.values())
        assert runners[TARGET_VERIFY.name].stats.replays.total() > 0


def test_all_passes_are_compiled_too() -> None:
    core = speculating(oracle(3, 30), "tc_piecewise")
    check(Driver(core).run(REQUESTS))
    assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


@pytest.mark.parametrize("params", EVERY, ids=["greedy", "drawn", "penalised", "penalised draws"])
def test_second_turns_find_accepted_tokens_alone(params: SamplingParams) -> None:
    """A rejected draft's keys in the prefix cache would show in nobody's first turn."""
    core = speculating(oracle(4, 50), "disabled", page_size=4, num_pages=200)
    driver = Driver(core)
    for length in range(9, 17):
        turn = (tuple(range(30, 30 + length)), replace(params, max_tokens=13))
        first = driver.run([turn])
        check(first)
        hits = core.scheduler.counts.prefix_hit_tokens
        second = (*first[0].request.prompt, *first[0].outputs, 3, 1)
        check(driver.run([(second, turn[1])]))
        assert core.scheduler.counts.prefix_hit_tokens - hits >= (length + 8) // 4 * 4


@pytest.mark.parametrize("offset", range(9))
def test_ends_within_a_round(offset: int) -> None:
    """A stop id at each place of a round."""
    core = speculating(oracle(3, 0), "disabled")
    prompt = (5, 9, 200, 3)
    stop = plain(prompt, GREEDY).tokens[offset]
    params = replace(GREEDY, stop_token_ids=(stop,), logprobs=1)
    check(Driver(core).run([(prompt, params), ((7,), GREEDY)]))


def test_all_of_the_context_is_used() -> None:
    """Rounds that are launched ahead of a row's end compute tokens past it, and past the context."""
    core = speculating(oracle(5, 20), "disabled", max_ahead=3)
    long = tuple(range(30, 30 + MAX_LEN - 20))
    requests = [(long, replace(one, max_tokens=40)) for one in EVERY] + [((9, 8, 7), GREEDY), ((4,) * 12, DRAWN)]
    driver = Driver(core, every=1)
    check(driver.run(requests))
    check(driver.run(requests[::-1]))


def test_a_scarce_cache() -> None:
    core = speculating(oracle(3, 30), "disabled", num_pages=16, reserve_tokens=0, max_ahead=3)
    check(Driver(core, every=1).run(REQUESTS))
    assert core.scheduler.counts.preemptions > 0


def raises(accepted: Any) -> torch.Tensor:
    raise ValueError("no idea")


NONSENSE: dict[str, Drafting] = {
    "raises": saying(3, raises),
    "out of the vocabulary": saying(3, lambda found: torch.full((len(found.rows), 3), 1 << 40)),
    "below 0": saying(3, lambda found: torch.full((len(found.rows), 3), -(1 << 40))),
    "of another shape": saying(3, lambda found: torch.zeros(len(found.rows), 7)),
    "its own rows": saying(3, lambda found: found.rows[:, None].repeat(1, 3)),
}


@pytest.mark.parametrize("backend", ["full", "disabled"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.faults] if name == "raises" else []) for name in NONSENSE]
)
def test_no_output_depends_on_the_drafter(name: str, backend: str) -> None:
    check(Driver(speculating(NONSENSE[name], backend)).run(REQUESTS[:6]))


def test_a_right_drafter_is_believed() -> None:
    core = speculating(oracle(3, 0), max_ahead=0, prefix_cache=False)
    check(Driver(core).run([(PROMPTS[0], replace(GREEDY, max_tokens=25))]))
    assert core.scheduler.counts.steps == 1 + 24 // 4


def test_requests_may_decline() -> None:
    core = speculating(oracle(3, 0), max_ahead=0, prefix_cache=False)
    for asked, steps in ((False, 24), (0, 24), (1, 12), (2, 8), (3, 6), (9, 6), (True, 6)):
        before = core.scheduler.counts.steps
        check(Driver(core).run([(PROMPTS[0], replace(GREEDY, max_tokens=25, speculate=asked))]))
        assert core.scheduler.counts.steps - before == 1 + steps, asked


def test_a_grammar_decodes_plainly_beside_others() -> None:
    def answer(core: EngineCore[Executor], *, alone: bool) -> tuple[list[int], list[int]]:
        constraint, params = Even(), replace(GREEDY, max_tokens=12)
        request = Request("guided", (5, 6, 7), params, run_ahead=False)
        [sequence] = core.add(request, [constraint])
        others = [] if alone else [core.add(Request(f"{n}", prompt, GREEDY))[0] for n, prompt in enumerate(PROMPTS[:3])]
        while not core.is_idle:
            core.step()
        check(others)
        assert constraint.came == sequence.outputs[:-1], "the last one ends it"
        return sequence.outputs, constraint.came

    llm = LLM(
        RandomCheckpoint(SHAPES["tiny"]), device="cpu",
        options=EngineOptions(max_seqs=4, max_len=64, dtype=torch.float32, attention="reference", kernels="reference"),
    )  # fmt: skip
    wanted = answer(llm.core, alone=True)
    assert all(token % 2 == 0 for token in wanted[0])
    for drafting in (ngram(3), oracle(2, 0)):
        assert answer(speculating(drafting), alone=drafting.name == "oracle") == wanted


def test_a_steady_round_is_one_launch_and_no_copy() -> None:
    params = replace(GREEDY, max_tokens=80)
    core = speculating(oracle(2, 60), reserve_tokens=MAX_LEN)
    runner, tables = core.executor.runners[TARGET_VERIFY.name], core.executor.tables
    sequences = [core.add(Request(f"{n}", prompt, params))[0] for n, prompt in enumerate(PROMPTS[:2])]
    for _ in range(6):
        core.step()
    loads, updates = runner.registry.counts.transfers, tables.counts.transfers
    replays, steps = runner.stats.replays.total(), core.scheduler.counts.steps
    for _ in range(15):
        core.step()
    assert core.scheduler.counts.steps - steps == runner.stats.replays.total() - replays == 15
    assert (runner.registry.counts.transfers, tables.counts.transfers) == (loads, updates)
    while not core.is_idle:
        core.step()
    check(sequences)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_the_recordings_are_right(backend: str) -> None:
    core = speculating(ngram(3), backend)
    for runner in core.executor.runners.values():
        report = verify(runner, batches=1)
        assert report.ok, report


@pytest.mark.faults
@pytest.mark.parametrize("name", [TARGET_VERIFY.name, PREFILL.name])
def test_a_step_that_raises_is_run_again_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has run: the tables are put back, and drafts are none of what the host must know."""
    core, launch, raised = speculating(oracle(3, 20), "disabled"), Executor.launch, list[int]()

    def failing(executor: Executor, step: Any) -> Any:
        launched = launch(executor, step)
        if step.pass_name == name and len(step.decodes.rows) > 1 and len(raised) < 3:
            raised.append(step.number)
            raise ValueError("it fell over")
        return launched

    monkeypatch.setattr(Executor, "launch", failing)
    check(Driver(core).run(REQUESTS))
    assert len(raised) == 3


def test_rounds_among_prompts_accept_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    core, counts, commit = speculating(oracle(3, 0)), list[int](), Scheduler.commit

    def noting(scheduler: Scheduler, step: ScheduledStep, sampled: Any, now: float | None = None) -> Any:
        if step.prefills and sampled.counts is not None:
            counts.extend(sampled.counts[: len(step.decodes)])
        return commit(scheduler, step, sampled, now)

    monkeypatch.setattr(Scheduler, "commit", noting)
    check(Driver(core, every=2).run(REQUESTS))
    assert max(counts) == 4


# -- front doors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("depth", [1, None, 5])
def test_an_llm_that_speculates(device: str, depth: int | None) -> None:
    options = EngineOptions(
        max_seqs=4, max_tokens=64, max_len=MAX_LEN, page_size=8, dtype=torch.float32,
        speculate="ngram", speculate_depth=depth,
    )  # fmt: skip
    on = EmulatedDevice(poison=True) if device == "emulated" else device
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device=on, options=options)
    for params in EVERY:
        found = llm.generate(PROMPTS, params)
        assert [tuple(one.tokens) for one in found] == [plain(prompt, params).tokens for prompt in PROMPTS]
    assert llm.limits.tokens_per_row == (depth or 3) + 1
    assert TARGET_VERIFY.name in llm.explain()


@pytest.mark.parametrize("backend", ["full", "disabled"])
def test_prompts_are_embedded_in_steps_with_rounds(backend: str) -> None:
    """Vectors are those of an engine that does not speculate, and texts those of plain decoding."""
    sizes: dict[str, Any] = {"max_seqs": 4, "max_tokens": 32, "max_len": MAX_LEN, "page_size": 8}
    options = EngineOptions(**sizes, dtype=torch.float32, embeddings=True)
    checkpoint, found = RandomCheckpoint(SHAPES["tiny"]), list[Any]()
    for one, decodes in ((options, "decode"), (replace(options, speculate="ngram"), TARGET_VERIFY.name)):
        asked = [ask(f"{name}.backend", backend, origin="test") for name in (decodes, "prefill", "embed")]
        core = LLM(checkpoint, device="emulated", options=one, asked=asked).core
        said, pooled = list[Any](), list[Any]()
        for number, (prompt, params) in enumerate(REQUESTS[:8]):
            said += core.add(Request(f"said {number}", prompt, params))
            pooling: Any = ("mean", "last")[number % 2]
            pooled += core.add(Request(f"{number}", prompt, SamplingParams(max_tokens=0), pooling=pooling))
            for _ in range(3):
                core.step()
        while not core.is_idle:
            core.step()
        check(said)
        assert all(sequence.error == "" for sequence in pooled)
        assert core.executor.runners["embed"].stats.replays.total() > 0 or backend == "disabled"
        found.append(torch.stack([torch.from_numpy(sequence.embedding) for sequence in pooled]))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_backend_is_asked_for_by_the_phase_s_name() -> None:
    options = EngineOptions(max_seqs=2, max_len=64, page_size=8, dtype=torch.float32, speculate="ngram")
    asked = [ask(f"{TARGET_VERIFY.name}.backend", "breakable", origin="test")]
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)
    assert llm.plan.phase(TARGET_VERIFY.name).backend == "breakable"


def test_requests_that_ask_for_more_than_there_is_are_refused() -> None:
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=EngineOptions(max_seqs=2, max_len=64))
    with pytest.raises(RequestError, match="this engine drafts nothing") as caught:
        llm.generate([[1, 2]], SamplingParams(speculate=True))
    assert caught.value.field == "speculate"
    llm.generate([[1, 2]], SamplingParams(speculate=False))
    for wrong in (-1, 1.5, "yes"):
        with pytest.raises(RequestError, match="speculate must be a whole number"):
            SamplingParams(speculate=wrong)  # type: ignore[arg-type]


# -- plain steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled", "tc_piecewise"])
def test_rounds_and_plain_steps_in_turn(backend: str) -> None:
    core = speculating(ngram(3), backend)
    core.scheduler.width = Switching((1, 4), every=3)
    check(Driver(core).run(REQUESTS))
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


def test_where_nobody_takes_drafts_steps_are_plain_and_steady() -> None:
    core = speculating(ngram(3), reserve_tokens=MAX_LEN)
    runner, tables = core.executor.runners[TARGET_VERIFY.name], core.executor.tables
    params = replace(GREEDY, max_tokens=60, speculate=False)
    sequences = [core.add(Request(f"{n}", prompt, params))[0] for n, prompt in enumerate(PROMPTS[:2])]
    for _ in range(6):
        core.step()
    before = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    for _ in range(20):
        core.step()
    after = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    assert after == (*before[:2], before[2] + 20)
    while not core.is_idle:
        core.step()
    check(sequences)
    assert {key.axes for key in runner.stats.replays} == {"drafts=off"}
    assert core.speculation.counts.plain["request"] == 2 * 59


def test_where_rounds_don_t_pay_steps_are_plain() -> None:
    """With costs that no drafter can make up for: drafts are compared with what comes, and no round is run."""
    core = speculating(oracle(3, 90), "disabled", max_ahead=1, prefix_cache=False)
    core.scheduler.width = WherePaid(core.scheduler.limits, StepCosts((4,), {4: (3.9,)}))
    for _ in range(3):
        check(Driver(core).run(REQUESTS[:4]))
    found = core.speculation.counts
    assert found.plain["cost"] > 50
    assert found.rounds == 0


def test_costs_are_measured_and_told() -> None:
    options = EngineOptions(
        max_seqs=2, max_tokens=32, max_len=MAX_LEN, page_size=8, dtype=torch.float32,
        speculate="ngram", speculate_depth=1, speculate_when="pays",
    )  # fmt: skip
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options)
    told = r"speculation: ngram drafts 1 token a round, where that pays \(.*: 2 tokens .*× at 2; not timed among prompt"
    assert re.search(told, llm.explain())
    for params in EVERY:
        found = llm.generate(PROMPTS, params)
        assert [tuple(one.tokens) for one in found] == [plain(prompt, params).tokens for prompt in PROMPTS]
    told = (
        r"speculation: .*( tokens a round over [\d,]+ rounds; accepted by position: [^;]+|no drafts verified yet)"
        r"(; decoded plainly: [^;]+)?(; [\d.]+ tokens a round by probes of [\d,]+ rows in plain steps)?"
        r"; \d+% of [\d,]+ steps were rounds; device time: [^;\n]+ ms a (round|plain step)\n"
    )
    assert re.search(told, llm.explain())
