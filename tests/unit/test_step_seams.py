"""Where steps are made: columns, passes and executors that the engine does not know, and steps that raise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph import LLM, EngineOptions, PlanError, SamplingParams
from phonograph.engine.cache.rows import Rows
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.decode import DecodeBatch, decode_pass
from phonograph.engine.passes.prefill import prefill_pass
from phonograph.engine.passes.registry import DECODE, HEARTBEAT, PREFILL, PassDeclaration, StepPasses
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.state.column import Column, Form, Writer
from phonograph.graphs.planning.settings import ask

_GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61))]


def make(device: str = "cpu", backend: str = "disabled", **options: Any) -> LLM:
    usual = {"max_seqs": 4, "max_tokens": 32, "max_len": 96, "page_size": 8, "dtype": torch.float32}
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    return LLM(
        RandomCheckpoint(SHAPES["tiny"]), device=device, options=EngineOptions(**{**usual, **options}), asked=asked
    )


class Failing:
    """An executor whose launch raises for some steps, before or after it has run them."""

    def __init__(self, inner: Executor, fails: Any, *, after: bool = False) -> None:
        self.inner, self._fails, self._after = inner, fails, after
        self.vocab, self.step_tables = inner.vocab, inner.step_tables
        self.collect, self.put_back, self.heartbeat = inner.collect, inner.put_back, inner.heartbeat

    def launch(self, step: Step) -> Any:
        fails = self._fails(step)
        if fails and not self._after:
            raise ConnectionError("before anything was sent")
        launched = self.inner.launch(step)
        if fails:
            raise ConnectionError("after all was done")
        return launched


def finished(core: EngineCore[Any]) -> None:
    for _ in range(1000):
        if core.is_idle:
            break
        core.step()
    core.scheduler.integrity()
    assert core.is_idle


# -- pages of those who wait ------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_that_waits_keeps_its_pages_when_the_step_of_others_raises(seed: int) -> None:
    llm = make(max_len=512, page_size=16, prefix_cache=False, cache_tokens=2048)
    params = SamplingParams(max_tokens=200, temperature=1.2, seed=seed, ignore_eos=True)
    (right,) = llm.generate([_PROMPTS[2]], params)
    executor = Failing(llm.executor, lambda step: any(chunk.tokens == (7, 8) for chunk in step.prefills))
    core = EngineCore(Scheduler(llm.limits, prefix_cache=False), executor)
    (waiting,) = core.add(Request("w", _PROMPTS[2], params, run_ahead=False))
    other: list[Sequence] = []
    while not core.is_idle:
        is_low = waiting.capacity - waiting.num_computed <= 32 and len(waiting.outputs) > 5
        if not other and not core.scheduler.is_idle and core.scheduler.num_in_flight and is_low:
            other = core.add(Request("o", (7, 8), params))
        core.step()
    assert "before anything was sent" in other[0].error
    assert waiting.outputs == right.tokens


def test_an_interrupt_loses_nobody_s_pages() -> None:
    llm = make(max_len=512, page_size=16, prefix_cache=False, cache_tokens=2048)
    params = SamplingParams(max_tokens=200, temperature=1.2, seed=1, ignore_eos=True)
    (right,) = llm.generate([_PROMPTS[2]], params)

    class Interrupted(Failing):
        def launch(self, step: Step) -> Any:
            if any(chunk.tokens == (7, 8) for chunk in step.prefills):
                raise KeyboardInterrupt
            return self.inner.launch(step)

    core = EngineCore(Scheduler(llm.limits, prefix_cache=False), Interrupted(llm.executor, None))
    (waiting,) = core.add(Request("w", _PROMPTS[2], params, run_ahead=False))
    num_interrupts = 0
    while not core.is_idle:
        is_low = waiting.capacity - waiting.num_computed <= 32 and len(waiting.outputs) > 5
        if not num_interrupts and core.scheduler.num_in_flight and is_low:
            core.add(Request("o", (7, 8), params))
        try:
            core.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert waiting.outputs == right.tokens


@pytest.mark.faults
def test_an_interrupt_of_a_retry_ends_the_step_alone() -> None:
    llm, raised = make(prefix_cache=False), list[type[BaseException]]()
    (right,) = llm.generate([_PROMPTS[0]], _GREEDY)

    class Twice(Failing):
        def launch(self, step: Step) -> Any:
            if any(chunk.tokens == (7, 8) for chunk in step.prefills):
                raised.append(KeyboardInterrupt if raised else RuntimeError)
                raise raised[-1]
            return self.inner.launch(step)

    core = EngineCore(Scheduler(llm.limits, prefix_cache=False), Twice(llm.executor, None))
    core.add(Request("o", (7, 8), _GREEDY))
    with pytest.raises(KeyboardInterrupt):
        finished(core)
    finished(core)
    (after,) = core.add(Request("a", _PROMPTS[0], _GREEDY))
    finished(core)
    assert after.outputs == right.tokens


def test_pages_of_a_step_that_raised_are_told_again_from_the_first_that_it_named() -> None:
    limits = Limits(max_seqs=2, max_tokens=8, max_len=64, page_size=4, num_pages=20)
    rows = Rows(limits, prefix_cache=False)
    sequences = [Sequence(Request(name, tuple(range(9))), 0, 4, frozenset(), rank=(1, 0, 0.0, 0)) for name in "ab"]
    assert all(rows.seat(sequence) for sequence in sequences)
    told = rows.page_updates()
    assert rows.page_updates() == ()
    first = sequences[0].row
    rows.tell_again([update for update in told if update[0] == first and update[1] >= 1])
    assert rows.page_updates() == tuple(update for update in told if update[0] == first and update[1] >= 1)
    rows.tell_again(told)
    rows.leave(sequences[0], 0)
    assert {row for row, _, _ in rows.page_updates()} == {sequences[1].row}, "who left has no pages to tell"


# -- state that passes alone write --------------------------------------------------------------------------


def seen(**changes: Any) -> Column:
    return Column(
        "seen",
        torch.int64,
        **{"writer": Writer.GRAPH, "form": Form.RESET, "trial": lambda trial: trial.whole(0, 9), **changes},
    )


def biased(logits: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(logits.shape[1])
    return logits + 4.0 * ((ids[None] % 11) == (state[:, None] % 11))


def remembering_decode(parts: PassParts, backend: str) -> Pass:
    """Adds up the tokens of a row, and prefers those that the sum says."""
    tables, model = parts.tables, parts.model

    def body(batch: DecodeBatch) -> Any:
        queries = Queries(batch.rows, tables.length, tables.pages[:, : batch.width], tokens_per_row=1, by_row=True)
        tables["seen"].index_add_(0, batch.rows, tables.last_token[batch.rows])
        logits = model.logits(model.hidden(tables.last_token, queries, parts.cache).states)
        return parts.tail.next_tokens(biased(logits, tables["seen"][batch.rows]), queries, batch.needs)

    return replace(decode_pass(parts), body=body)


def remembering_prefill(parts: PassParts, backend: str) -> Pass:
    one, tables = prefill_pass(parts, backend), parts.tables
    assert one.tail is not None

    def body(batch: Any) -> Any:
        tokens = torch.where(batch.decoding, tables.last_token[batch.rows], batch.tokens)
        tables["seen"].index_add_(0, batch.rows, tokens)
        return one.body(batch)

    return replace(one, body=body)


def remembering(llm: LLM, column: Column) -> Executor:
    passes = (
        replace(DECODE, make=remembering_decode, columns=lambda: [column]),
        replace(PREFILL, make=remembering_prefill),
        HEARTBEAT,
    )
    executor = Executor(llm.executor.model, TorchSampler(), llm.device, llm.plan, llm.limits, passes=passes)
    executor.capture()
    return executor


def outputs(executor: Any, limits: Limits, prompts: Any, **changes: Any) -> list[Sequence]:
    core = EngineCore(Scheduler(limits, prefix_cache=False, **changes), executor)
    found = [core.add(Request(str(number), prompt, _GREEDY))[0] for number, prompt in enumerate(prompts)]
    finished(core)
    return found


@pytest.mark.faults
@pytest.mark.parametrize("after", [False, True])
def test_state_of_a_pass_is_not_put_back_by_a_reset(after: bool) -> None:
    llm = make("emulated", "full", prefix_cache=False)
    executor = remembering(llm, seen())
    right = [outputs(executor, llm.limits, [prompt], mixed=False)[0].outputs for prompt in _PROMPTS]
    assert [one.outputs for one in outputs(executor, llm.limits, _PROMPTS, mixed=False)] == right
    failing = Failing(executor, lambda step: step.number == 6, after=after)
    for sequence, expected in zip(outputs(failing, llm.limits, _PROMPTS, mixed=False), right, strict=True):
        assert sequence.outputs == expected or r"per-row state (seen) can't be restored" in sequence.error


@pytest.mark.faults
def test_a_sequence_that_enters_in_the_step_that_raised_is_put_back() -> None:
    llm = make(prefix_cache=False)
    executor, failed = remembering(llm, seen()), list[int]()

    def fails(step: Step) -> bool:
        failed.append(step.number)
        return len(failed) == 1

    (right,) = outputs(executor, llm.limits, _PROMPTS[:1])
    (found,) = outputs(Failing(executor, fails, after=True), llm.limits, _PROMPTS[:1])
    assert (found.outputs, found.error) == (right.outputs, "")


def test_prompts_that_a_pass_keeps_something_of_are_not_shared() -> None:
    llm = make()
    executor = remembering(llm, seen())
    assert executor.step_tables.prompt_state == ("seen",)
    with pytest.raises(PlanError, match=r"state by row \(seen\).*prefix_cache=False"):
        EngineCore(Scheduler(llm.limits), executor)
    EngineCore(Scheduler(llm.limits, prefix_cache=False), executor)
    EngineCore(Scheduler(llm.limits), remembering(llm, seen(from_prompt=False)))
    assert llm.executor.step_tables.prompt_state == ()
    assert llm.prefix_sharing.is_on


def test_an_engine_with_such_a_pass_turns_sharing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import phonograph.engine.llm as module

    def with_column(*args: Any, **options: Any) -> Executor:
        declared: PassDeclaration = replace(DECODE, columns=lambda: [seen()])
        return Executor(*args, **{**options, "passes": (declared, PREFILL, HEARTBEAT)})

    monkeypatch.setattr(module, "Executor", with_column)
    llm = make()
    assert not llm.prefix_sharing.is_on
    assert "state by row (seen)" in llm.explain()


# -- passes that steps name -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"decodes": "rounds"}, "'rounds' for decodes.*decode, prefill"),
        ({"decodes": "idle"}, "'idle' for decodes"),
        ({"mixed": "decode"}, r"'decode' for mixed.*Name one of: prefill\."),
        ({"mixed": "idle"}, "'idle' for mixed"),
        ({"mixed": ""}, "'' for mixed"),
    ],
)
def test_steps_that_no_pass_can_run_are_refused_before_the_first(named: dict[str, str], said: str) -> None:
    llm = make()
    with pytest.raises(PlanError, match=said):
        EngineCore(Scheduler(llm.limits, passes=StepPasses(**named)), llm.executor)


def test_decodes_may_run_in_the_pass_of_mixed_steps() -> None:
    llm = make(prefix_cache=False)
    right = [llm.generate([prompt], _GREEDY)[0].tokens for prompt in _PROMPTS]
    found = outputs(llm.executor, llm.limits, _PROMPTS, passes=StepPasses(decodes=PREFILL.name))
    assert [(one.outputs, one.error) for one in found] == [(tokens, "") for tokens in right]


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_overlap_is_resumed_before_replays_that_follow_other_launches(
    monkeypatch: pytest.MonkeyPatch, speculate: Any
) -> None:
    llm = LLM(
        RandomCheckpoint(SHAPES["tiny"]),
        device="emulated",
        options=EngineOptions(max_seqs=2, max_len=256, page_size=8, dtype=torch.float32, speculate=speculate),
    )
    executor, told = llm.executor, list[str]()
    monkeypatch.setattr(type(llm.kernels), "resume_overlap", lambda self: told.append("resumed"))
    launch = executor.launch

    def launched(step: Step) -> Any:
        told.append("updated" if step.updates is not None and not step.prefills else "")
        before, found = len(told), launch(step)
        told.append("mixed" if step.prefills else "replayed")
        assert step.prefills == () or len(told) == before + 1  # nothing is resumed for what is not one replay
        return found

    monkeypatch.setattr(executor, "launch", launched)
    llm.generate([_PROMPTS[0], _PROMPTS[2]], replace(_GREEDY, max_tokens=150))
    steps = [one for one in told if one]
    places = [place for place, one in enumerate(steps) if one == "resumed"]
    assert {"mixed", "updated"} == {steps[place - 1] for place in places}
    # Before each replay after a mixed step or an update of the tables, and before no other.
    for place, one in enumerate(steps):
        if one == "replayed":
            assert (steps[place - 1] == "resumed") == (steps[place - 1] != "replayed")
