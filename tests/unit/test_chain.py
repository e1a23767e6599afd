"""A speculative round as a chain of two passes, draft and verify, which only this test has.

The drafter knows what plain decoding says and spoils some of it at random; at most so many tokens stay as a second
draw says, from none to all four, whatever was right. Draws are made on the device: the host never knows.

Files of the package that it touches: none. As part of the package it would touch three beside its own (its rounds, its
passes, its columns): a line in engine/passes/registry.py, an option in engine/options.py, and the choice of passes and
of `tokens_per_row` in engine/llm.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph import LLM, DeclarationError, EmulatedDevice, EngineOptions, SamplingParams, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.chain import chained
from phonograph.engine.passes.decode import DecodeBatch, DecodeBatches, decode_pass, rows_slot, sample_rows
from phonograph.engine.passes.prefill import prefill_pass
from phonograph.engine.passes.readback import Picked
from phonograph.engine.passes.registry import DECODE, HEARTBEAT, PREFILL, PassDeclaration, StepPasses
from phonograph.engine.passes.sampling_tail import SAMPLING
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence as RequestSequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.state.column import Column, Form, Writer
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.planning.settings import PhaseDefaults, ask
from phonograph.graphs.running.runner_options import facts_of

pytestmark = pytest.mark.slow

WIDTH = 4
MAX_LEN = 96
POSITIONS = MAX_LEN + WIDTH - 1
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61)), (11,) * 9, tuple(range(100, 117)), (1, 2)]


def drawn(row: torch.Tensor, number: torch.Tensor, salt: torch.Tensor | int, below: int) -> torch.Tensor:
    """Numbers that look random, made from what is in the tables."""
    mixed = (row * 7919 + number * 104729 + salt * 1299709 + 12345) * 2654435761
    return ((mixed >> 11) ^ (mixed >> 23)) % below


class OracleRounds:
    """The protocol `Rounds`."""

    taps: tuple[int, ...] = ()
    leaves: tuple[str, ...] = ()
    ahead = 0

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts

    def tokens(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tables = self._parts.tables
        places = (tables.length[rows] + offsets).clamp_max(POSITIONS - 1)
        spoiled = drawn(rows, tables["rounds"][rows], offsets, 5) == 0
        said = (tables["oracle"][rows, places] + spoiled) % self._parts.model.config.vocab
        return torch.where(offsets == 0, tables.last_token[rows], said)

    def read(
        self, tokens: torch.Tensor, following: torch.Tensor, queries: Queries, taps: tuple[torch.Tensor, ...]
    ) -> None:
        return None

    def accept(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        queries: Queries,
        needs: SamplingNeeds,
    ) -> tuple[Picked, torch.Tensor]:
        parts, tables = self._parts, self._parts.tables
        picked = parts.tail.pick(logits, queries, needs).tokens.view(-1, WIDTH)
        rows = queries.rows.view(-1, WIDTH)[:, 0]
        rounds = tables["rounds"][rows]
        most = torch.zeros_like(tables["limit"]).index_put_((rows,), drawn(rows, rounds, 3, WIDTH + 1) - 1)
        bounds = most, tables["limit"]
        taken = parts.model.kernels.rounds.accept(queries, tokens, picked, bounds, tables.last_token, tables.length)
        tables["rounds"].index_put_((rows,), rounds + 1)
        return Picked(taken.block), taken.tokens


def columns(answers: Mapping[tuple[int, ...], Sequence[int]]) -> list[Column]:
    def oracle(entry: Any) -> list[int]:
        prompt = entry.sequence.request.prompt
        return [*prompt, *answers[prompt]]

    return [
        Column("oracle", torch.int64, width=POSITIONS, value=oracle),
        Column(
            "limit",
            torch.int64,
            value=lambda entry: entry.sequence.max_computed,
            trial=lambda trial: trial.whole(MAX_LEN, MAX_LEN + 1),
        ),
        Column(
            "rounds",
            torch.int64,
            writer=Writer.GRAPH,
            form=Form.RESET,
            from_prompt=False,
            trial=lambda trial: trial.whole(0, 99),
        ),
    ]


def draft_pass(parts: PassParts, declared: PassDeclaration) -> Pass:
    """What each row of the batch computes: its last token, and what is drafted after it."""
    batches, rounds = DecodeBatches(parts.limits), OracleRounds(parts)

    def body(batch: DecodeBatch) -> torch.Tensor:
        rows = batch.rows.repeat_interleave(WIDTH)
        return rounds.tokens(rows, torch.arange(WIDTH).repeat(batch.rows.shape[0]))

    return Pass(
        declared,
        tokens_per_row=WIDTH,
        bucketed="seqs",
        slots=[rows_slot(parts.limits)],
        batch=batches.batch,
        is_steady=batches.is_steady,
        body=body,
        sample=lambda extent, seed: sample_rows(parts, extent, seed),
        preserve=parts.trials.running,
        reads=("oracle", "rounds"),
    )


def verify_pass(parts: PassParts, declared: PassDeclaration) -> Pass:
    """The model over all of them, and how many stay."""
    rounds, tables, model = OracleRounds(parts), parts.tables, parts.model

    def body(batch: DecodeBatch, tokens: torch.Tensor) -> Picked:
        rows = batch.rows.repeat_interleave(WIDTH)
        positions = tables.length[rows] + torch.arange(WIDTH).repeat(batch.rows.shape[0])
        queries = Queries(rows, positions, tables.pages[:, : batch.width], tokens_per_row=WIDTH)
        logits = model.logits(model.hidden(tokens, queries, parts.cache).states)
        return rounds.accept(logits, tokens, queries, batch.needs)[0]

    return replace(
        draft_pass(parts, declared),
        body=body,
        axes=[replace(SAMPLING, unrecorded=frozenset({"detailed"}))],
        reads=("limit", "rounds"),
        writes=("rounds",),
    )


def round_pass(parts: PassParts, backend: str) -> Pass:
    draft = draft_pass(parts, DRAFT)
    return chained(ROUND, draft, replace(verify_pass(parts, VERIFY), is_steady=draft.is_steady))


def mixed_pass(parts: PassParts, backend: str) -> Pass:
    return prefill_pass(parts, backend, MIXED, OracleRounds(parts))


ANSWERS: dict[tuple[int, ...], Sequence[int]] = {}
ROUND = PassDeclaration(
    PhaseDefaults("round"), limit=lambda size: size.max_seqs, make=round_pass, columns=lambda: columns(ANSWERS)
)
DRAFT, VERIFY = replace(ROUND, defaults=PhaseDefaults("draft")), replace(ROUND, defaults=PhaseDefaults("verify"))
MIXED = PassDeclaration(PhaseDefaults("mixed"), limit=lambda size: size.max_tokens, make=mixed_pass, is_ragged=True)
SPECULATING = (ROUND, MIXED, HEARTBEAT)


class Plain:
    """Plain decoding, and the model that both use."""

    def __init__(self) -> None:
        options = EngineOptions(
            max_seqs=4, max_tokens=64, max_len=POSITIONS, page_size=8, dtype=torch.float32,
            attention="reference", kernels="reference", prefix_cache=False,
        )  # fmt: skip
        asked = [ask(f"{name}.backend", "disabled", origin="test") for name in ("decode", "prefill", "idle")]
        self.llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)

    def answers(self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        return [self.llm.generate([prompt], params)[0].tokens for prompt in prompts]


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


def speculating(plain: Plain, backend: str = "full", *, mixed: bool = True, **changes: Any) -> EngineCore[Executor]:
    usual: dict[str, Any] = {"max_seqs": 4, "max_tokens": 32, "max_len": MAX_LEN, "page_size": 8, "num_pages": 60}
    limits = Limits(**{**usual, "max_ahead": 2, "tokens_per_row": WIDTH, **changes})
    device = EmulatedDevice(poison=True)
    asked = [ask(f"{one.name}.backend", backend, origin="test") for one in SPECULATING]
    plan = resolve(asked, facts_of(device), [one.defaults for one in SPECULATING])
    executor = Executor(plain.llm.executor.model, TorchSampler(), device, plan, limits, passes=SPECULATING)
    executor.capture()
    scheduler = Scheduler(limits, mixed=mixed, passes=StepPasses(ROUND.name, MIXED.name))
    return EngineCore(scheduler, executor)


def run(
    core: EngineCore[Executor], prompts: Sequence[tuple[int, ...]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Requests come one after the other, so that rounds and prompts share steps."""
    sequences, waiting = [], list(enumerate(prompts))
    for moment in range(2000):
        if waiting and moment % 3 == 0:
            number, prompt = waiting.pop(0)
            sequences += core.add(Request(f"{prompt}-{number}", prompt, params))
        core.step()
        if not waiting and core.is_idle:
            break
    core.scheduler.integrity()
    assert all(sequence.error == "" for sequence in sequences)
    tables = core.executor.tables
    assert bool((tables.length <= tables["limit"]).all()), "rounds launched ahead of a row's end take nothing"
    return [sequence.outputs for sequence in sequences]


@pytest.fixture
def wanted(plain: Plain) -> list[list[int]]:
    found = plain.answers(PROMPTS)
    ANSWERS.clear()
    ANSWERS.update(zip(PROMPTS, found, strict=True))
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_ahead": 0}, {"max_ahead": 3}, {"page_size": 4, "num_pages": 100}, {"num_pages": 16}, {"mixed": False}],
    ids=str,
)
@pytest.mark.parametrize("backend", ["full", "breakable", "disabled"])
def test_rounds_say_what_plain_decoding_says(
    plain: Plain, wanted: list[list[int]], backend: str, changes: dict[str, Any]
) -> None:
    core = speculating(plain, backend, **changes)
    assert run(core, PROMPTS) == wanted
    again = run(core, PROMPTS[::-1])
    assert again[::-1] == wanted, "a second turn finds prefixes of the first"
    runners = core.executor.runners
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in runners.values())
        assert runners[ROUND.name].stats.replays.total() > 0
        assert runners[MIXED.name].stats.replays.total() > 0


@pytest.mark.parametrize("scored_places", [1, 64])
def test_prompts_are_scored_among_rounds(plain: Plain, wanted: list[list[int]], scored_places: int) -> None:
    params = replace(GREEDY, prompt_logprobs=3)
    core, scored = speculating(plain, scored_places=scored_places), list[RequestSequence]()
    add = core.add

    def noting(request: Request) -> list[RequestSequence]:
        scored.extend(found := add(request))
        return found

    core.add = noting  # type: ignore[assignment, method-assign]
    assert run(core, PROMPTS, params) == wanted
    for sequence, prompt in zip(scored, PROMPTS, strict=True):
        (alone,) = plain.llm.generate([prompt], replace(params, max_tokens=0))
        assert [one.token for one in sequence.prompt_logprobs] == list(prompt[1:])
        found, expected = ([one.logprob for one in of] for of in (sequence.prompt_logprobs, alone.prompt_logprobs))
        assert found == pytest.approx(expected, abs=1e-4)


def test_counts_from_none_to_all_are_met(
    plain: Plain, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, counts, among_prompts, commit = speculating(plain), list[int](), list[int](), Scheduler.commit

    def noting(scheduler: Scheduler, step: ScheduledStep, sampled: Any, now: float | None = None) -> Any:
        (among_prompts if step.prefills else counts).extend(sampled.counts[: len(step.decodes)])
        return commit(scheduler, step, sampled, now)

    monkeypatch.setattr(Scheduler, "commit", noting)
    assert run(core, PROMPTS) == wanted
    assert set(counts) == {0, 1, 2, 3, 4}
    assert len(set(among_prompts)) > 2


def test_a_steady_round_is_one_launch_and_no_copy(plain: Plain) -> None:
    prompts = [(5, 9, 200, 3), (7,)]
    params = replace(GREEDY, max_tokens=80)
    ANSWERS.update(zip(prompts, plain.answers(prompts, params), strict=True))
    core = speculating(plain, reserve_tokens=MAX_LEN)
    runner, tables = core.executor.runners[ROUND.name], core.executor.tables
    sequences = [core.add(Request(str(number), prompt, params))[0] for number, prompt in enumerate(prompts)]
    for _ in range(6):
        core.step()
    loads, updates = runner.registry.counts.transfers, tables.counts.transfers
    replays, steps = runner.stats.replays.total(), core.scheduler.counts.steps
    for _ in range(20):
        core.step()
    assert core.scheduler.counts.steps - steps == runner.stats.replays.total() - replays == 20
    assert runner.registry.counts.transfers == loads
    assert tables.counts.transfers == updates
    while not core.is_idle:
        core.step()
    assert [sequence.outputs for sequence in sequences] == [ANSWERS[prompt] for prompt in prompts]


def test_a_prompt_up_to_the_very_end_writes_in_nobody_s_pages(plain: Plain) -> None:
    """Rounds that are launched ahead of a row's end compute tokens past it, and past the context."""
    prompts = [tuple(range(30, 30 + MAX_LEN - 20)), (9, 8, 7), (4,) * 12]
    params = replace(GREEDY, max_tokens=20)
    found = plain.answers(prompts, params)
    ANSWERS.update(zip(prompts, found, strict=True))
    core = speculating(plain, max_ahead=3)
    assert run(core, prompts, params) == found
    assert run(core, prompts[::-1], params)[::-1] == found


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_the_recordings_are_right(plain: Plain, wanted: list[list[int]], backend: str) -> None:
    core = speculating(plain, backend)
    for runner in core.executor.runners.values():
        report = verify(runner, batches=1)
        assert report.ok, report


def test_what_can_t_be_chained_is_refused(plain: Plain) -> None:
    executor = plain.llm.executor
    parts = PassParts(executor.model, TorchSampler(), executor.tables, executor.cache, {}, executor.limits)
    decode, prefill = decode_pass(parts), prefill_pass(parts, "full")
    with pytest.raises(DeclarationError, match="has no passes"):
        chained(DECODE)
    with pytest.raises(DeclarationError, match="'decode' by seqs and 'prefill' by tokens"):
        chained(DECODE, decode, prefill)
    with pytest.raises(DeclarationError, match="'prefill' has a tail"):
        chained(PREFILL, prefill, prefill)
    other = replace(decode, slots=[replace(decode.slots[0], valid=(0, 1))])
    with pytest.raises(DeclarationError, match="two different 'rows'"):
        chained(DECODE, decode, other)
    with pytest.raises(DeclarationError, match="for 1 tokens a row has rounds"):
        prefill_pass(parts, "full", rounds=OracleRounds(parts))


def chained_parts(plain: Plain) -> PassParts:
    executor = plain.llm.executor
    return PassParts(executor.model, TorchSampler(), executor.tables, executor.cache, {}, executor.limits)


def test_columns_of_links_are_the_chain_s(plain: Plain) -> None:
    decode, column = (
        decode_pass(chained_parts(plain)),
        Column("drafts", torch.int64, writer=Writer.GRAPH, form=Form.RESET),
    )
    drafting = replace(decode, declared=replace(DECODE, columns=lambda: [column]))
    with pytest.raises(DeclarationError, match=r"'decode' has no column 'drafts'.*columns= of the chain"):
        chained(DECODE, decode, drafting)
    having = replace(DECODE, columns=lambda: [replace(column, dtype=torch.int32)])
    with pytest.raises(DeclarationError, match="declare the column 'drafts' differently"):
        chained(having, decode, drafting)
    chained(drafting.declared, decode, drafting)


def test_links_keep_what_the_chain_keeps(plain: Plain) -> None:
    decode = decode_pass(chained_parts(plain))

    def keeps(model: Any) -> Any:
        return model.keeps

    keeping = replace(decode, declared=replace(DECODE, keeps=keeps))
    for declared in (DECODE, replace(DECODE, keeps=lambda model: model.keeps[:1])):
        with pytest.raises(DeclarationError, match=r"keeps something else in pages than the chain.*same keeps="):
            chained(declared, decode, keeping)
    chained(keeping.declared, decode, keeping)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ({"reads": ("oracle",)}, "reads or writes the column 'oracle', which nobody declares"),
        ({"writes": ("oracle",)}, "reads or writes the column 'oracle', which nobody declares"),
        (
            {"reads": ("drafts",)},
            r"reads the column 'drafts', which forward passes alone write, and none does.*writes=",
        ),
        ({"writes": ("temperature",)}, r"writes the column 'temperature', which only the host writes.*Writer.GRAPH"),
        ({"reads": ("drafts",), "writes": ("drafts",)}, ""),
        ({"reads": ("temperature", "last_token", "length", "counts")}, ""),
    ],
)
def test_a_link_that_reads_what_nobody_writes_is_refused(plain: Plain, use: dict[str, Any], said: str) -> None:
    column = Column("drafts", torch.int64, writer=Writer.GRAPH, form=Form.RESET, from_prompt=False)
    declared = replace(DECODE, columns=lambda: [column])

    def make(parts: PassParts, backend: str) -> Pass:
        decode = decode_pass(parts)
        return chained(declared, replace(decode, body=lambda batch: None), replace(decode, **use))

    def built() -> Executor:
        llm, passes = plain.llm, (replace(declared, make=make), PREFILL, HEARTBEAT)
        return Executor(llm.executor.model, TorchSampler(), llm.device, llm.plan, llm.limits, passes=passes)

    if not said:
        assert set(built().passes["decode"].reads) == set(use["reads"])
        return
    with pytest.raises(DeclarationError, match=said):
        built()


def test_a_chain_is_steady_if_all_its_links_are(plain: Plain) -> None:
    executor = plain.llm.executor
    parts = PassParts(executor.model, TorchSampler(), executor.tables, executor.cache, {}, executor.limits)
    always = replace(decode_pass(parts), is_steady=lambda step: True)
    never = replace(always, is_steady=lambda step: False)
    found = [chained(DECODE, *links).is_steady(Step(1, "decode")) for links in ((always, always), (always, never))]
    assert found == [True, False]
