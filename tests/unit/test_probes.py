"""Probes: drafts before plain steps come back with the tokens, and are compared with what comes; no token depends on
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_head import write_random_head

from drafted import GREEDY, PROMPTS, REQUESTS
from drafters import engine, every_drafter, made
from mixed_steps import DEPTH
from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.speculation import measured_costs
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.registry import DRAFT_EXTEND, PREFILL, TARGET_VERIFY
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled, ScheduledStep
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.probes import Probes
from phonograph.engine.scheduling.step_width import Planned, WherePaid
from phonograph.graphs.planning.settings import ask
from speculation import MAX_LEN, Driver, Even, Switching, check, oracle, plain, speculating

SLOW = pytest.mark.slow


@pytest.fixture
def drafting(request: pytest.FixtureRequest, tmp_path: Path) -> Drafting:
    return made(request.param, tmp_path)


@dataclass
class Watched:
    """An engine whose steps are plain, of which some are probes; what came of these."""

    core: EngineCore[Executor]
    widths: tuple[int, ...] = (1,)
    every: int = 2
    """Of plain steps."""
    found: list[tuple[ScheduledStep, np.ndarray[Any, Any]]] = field(default_factory=list)
    missing: int = 0
    """Probes of which no drafts came."""
    brought: Counter[tuple[int, bool]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.core.scheduler.width = Switching(self.widths, probes=self.every)
        tally = self.core.speculation
        note = tally.note

        def noting(step: ScheduledStep, updates: Any, sampled: Sampled) -> list[Counter[tuple[int, bool]]]:
            assert step.probes or sampled.probed is None
            if step.probes and sampled.probed is not None:
                self.found.append((step, sampled.probed))
            self.missing += step.probes and sampled.probed is None
            probed = note(step, updates, sampled)
            for counts in probed:
                self.brought += counts
            return probed

        tally.note = noting  # type: ignore[method-assign]


# -- in engines -------------------------------------------------------------------------------------------------


@every_drafter
@pytest.mark.parametrize(
    "backend", ["full", *(pytest.param(name, marks=SLOW) for name in ("breakable", "tc_piecewise", "disabled"))]
)
def test_tokens_are_those_of_plain_decoding(drafting: Drafting, backend: str) -> None:
    """Probes among prompts too, rounds between them, and second turns."""
    core = engine(drafting, backend)
    watched = Watched(core, (1, 1, 1, DEPTH + 1, 1))
    driver = Driver(core)
    check(driver.run(REQUESTS))
    check(driver.run(REQUESTS[::-1]))
    assert any(step.prefills for step, _ in watched.found)
    assert all(probed.shape == (len(step.decodes), DEPTH) for step, probed in watched.found)
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


@every_drafter
@pytest.mark.parametrize(
    ("backend", "max_ahead"),
    [("full", 0), ("full", 3), *(pytest.param(one, 2, marks=SLOW) for one in ("breakable", "tc_piecewise"))],
)
def test_a_round_in_the_place_of_the_plain_step_would_have_verified_the_same(
    drafting: Drafting, backend: str, max_ahead: int
) -> None:
    """What comes back is what the table has when the step is launched."""
    core = engine(drafting, backend, max_ahead=max_ahead)
    watched = Watched(core, every=3)
    tables, launch, seen = core.executor.tables, core.executor.launch, dict[int, list[list[int]]]()

    def noting(step: Any) -> Any:
        launched = launch(step)
        if step.probes:
            seen[step.number] = tables["draft"].view(-1, DEPTH)[step.decodes.rows].tolist()
        return launched

    core.executor.launch = noting  # type: ignore[method-assign]
    check(Driver(core).run(REQUESTS[:6]))
    assert len(watched.found) > 5
    assert {step.number: probed.tolist() for step, probed in watched.found} == seen


@pytest.mark.parametrize("spoiled", [0, 100])
def test_what_is_compared_is_what_rounds_would_have_brought(spoiled: int) -> None:
    """Of a drafter that is always right all drafts are, and of one that is always wrong none."""
    core = speculating(oracle(DEPTH, spoiled), "disabled", prefix_cache=False)
    watched = Watched(core, every=3)
    check(Driver(core).run([(prompt, GREEDY) for prompt in PROMPTS]))
    found = watched.brought
    whole, cut_off = (sum(rows for (_, cut), rows in found.items() if cut == is_cut) for is_cut in (False, True))
    assert whole > 10
    if spoiled:
        assert set(found) == {(1, False)}
    else:
        assert {brought for brought, is_cut_off in found if not is_cut_off} == {DEPTH + 1}
        assert cut_off, "ends of answers, by max_tokens"
    counts = core.speculation.counts
    assert counts.probed == found.total()
    assert counts.probed_tokens == sum((brought - cut) * rows for (brought, cut), rows in found.items())
    assert f"tokens a round by probes of {counts.probed:,} rows in plain steps" in str(counts)


@every_drafter
def test_a_probe_is_one_more_launch(drafting: Drafting) -> None:
    core = engine(drafting, reserve_tokens=MAX_LEN)
    Watched(core, every=1)
    core.add(Request("a", PROMPTS[0], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    for _ in range(4):
        core.step()
    runners = core.executor.runners
    before = {name: one.stats.replays.total() for name, one in runners.items()}
    for _ in range(10):
        core.step()
    grown = {name: one.stats.replays.total() - before[name] for name, one in runners.items()}
    assert grown == {**dict.fromkeys(runners, 0), TARGET_VERIFY.name: 10, DRAFT_EXTEND.name: 10}


@every_drafter
def test_all_rows_have_places_for_their_drafts(drafting: Drafting) -> None:
    """Among prompts that end, too: the step has as many tokens as rows, and each of its decodes all drafts."""
    core = engine(drafting, max_ahead=0)
    watched = Watched(core, every=1)
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    check(Driver(core, every=1).run([(prompt, asked) for prompt in PROMPTS]))
    assert max(len(step.sampling) for step, _ in watched.found) == core.scheduler.limits.max_seqs
    assert max(len(probed) for _, probed in watched.found) == core.scheduler.limits.max_seqs
    assert any(len(step.decodes) < len(step.sampling) == 4 for step, _ in watched.found)


@pytest.mark.faults
@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
def test_a_pass_that_raises_costs_the_probe_and_no_token(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = engine(drafting, "disabled")
    watched = Watched(core)

    def run(batch: Any) -> object:
        raise RuntimeError("no memory to read")

    monkeypatch.setattr(core.executor.runners[DRAFT_EXTEND.name], "run", run)
    check(Driver(core).run(REQUESTS[:6]))
    assert not watched.found
    assert watched.missing > 5
    assert "no memory to read" in caplog.text


@pytest.mark.faults
def test_a_step_that_is_tried_row_by_row_has_no_probe() -> None:
    core = speculating(oracle(DEPTH, 50), "disabled", max_ahead=1)
    watched = Watched(core)
    launch, failures = core.executor.launch, iter((False,) * 9 + (True,) + (False,) * 999)

    def failing(step: Any) -> Any:
        if next(failures):
            raise RuntimeError("once")
        return launch(step)

    core.executor.launch = failing  # type: ignore[method-assign]
    check(Driver(core).run(REQUESTS[:6]))
    assert watched.missing == 1


@pytest.mark.parametrize(("spoiled", "is_used"), [(0, True), (20, True), (100, False)])
@pytest.mark.parametrize("max_ahead", [0, 2])
def test_probes_find_out_whether_rounds_pay(spoiled: int, is_used: bool, max_ahead: int) -> None:
    core = speculating(oracle(DEPTH, spoiled), "disabled", max_ahead=max_ahead, prefix_cache=False)
    costs = StepCosts((1, 4), {DEPTH + 1: (1.8, 1.8)}, (0.3, 0.3))
    core.scheduler.width = WherePaid(core.scheduler.limits, costs)
    check(Driver(core).run([(prompt, GREEDY) for prompt in PROMPTS * 2]))
    assert core.speculation.counts.accepted[0] == 0 or is_used
    assert (core.speculation.counts.rounds > 20) == is_used


@SLOW
@pytest.mark.parametrize("speculate", ["ngram", "eagle"])
def test_an_engine_where_rounds_must_pay_says_what_plain_decoding_says(speculate: Any, tmp_path: Path) -> None:
    write_random_head(tmp_path, SHAPES["tiny"], 100, torch.float32)
    options = EngineOptions(
        max_seqs=4, max_tokens=64, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate=speculate,
        speculate_when="pays", draft=tmp_path if speculate == "eagle" else None,
    )  # fmt: skip
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options)
    for _ in range(3):
        found = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)
        assert [tuple(one.tokens) for one in found] == [plain(prompt, GREEDY).tokens for prompt in PROMPTS]
    probed = llm.executor.runners[DRAFT_EXTEND.name].stats.replays.total()
    assert probed
    assert all(runner.stats.eager.total() == 0 for runner in llm.executor.runners.values())
    assert llm.executor.runners[PREFILL.name].stats.replays.total()


# -- by hand ----------------------------------------------------------------------------------------------------


def sequence(outputs: list[int], **params: Any) -> Sequence:
    found = Sequence(
        Request("a", (1,), SamplingParams(max_tokens=50, **params)), 0, 50, frozenset(), rank=(1, 0, 0.0, 0)
    )
    found.outputs.extend(outputs)
    return found


def compared(
    rows: Collection[tuple[Sequence, list[int], list[int]]], steps: int = 2
) -> list[Counter[tuple[int, bool]]]:
    """Of rows that each have drafts, and so many tokens after the probe's, in further steps."""
    probes, decodes = Probes(3), tuple(one for one, _, _ in rows)
    for one, _, said in rows:
        one.outputs.append(said[0])
    step = ScheduledStep(1, decodes, (), (), pass_name="x", catches_up=True, probes=True)
    found = list(
        probes.took(
            step,
            [(one, (said[0],), None) for one, _, said in rows],
            Sampled([], probed=np.array([drafts for _, drafts, _ in rows])),
        )
    )
    for number in range(steps):
        assert not found, "it is not known yet"
        for one, _, said in rows:
            one.outputs.extend(said[number + 1 : number + 2])
        plain = ScheduledStep(2 + number, decodes, (), (), pass_name="x")
        found += probes.took(plain, [], Sampled([]))
    return found


def test_drafts_are_right_up_to_the_first_that_is_not() -> None:
    rows = [
        (sequence([7, 7]), [1, 2, 3], [1, 2, 3]),
        (sequence([]), [1, 2, 3], [1, 9, 3]),
        (sequence([7]), [-1, -1, -1], [1, 2, 3]),
        (sequence([]), [1, 2, -1], [1, 2, 3]),
    ]
    assert compared(rows) == [Counter({(4, False): 1, (2, False): 1, (1, False): 1, (3, False): 1})]


def test_rows_that_take_fewer_drafts() -> None:
    """By their request: of deeper places nothing is known. A row that takes none tells nothing of any."""
    grammar = sequence([])
    grammar.constraint = Even()
    rows = [(sequence([], speculate=2), [1, 2, 3], [1, 2, 3]), (grammar, [1, 2, 3], [1, 2, 3])]
    rows.append((sequence([], speculate=False), [1, 2, 3], [1, 2, 3]))
    assert compared(rows) == [Counter({(3, True): 1})]
    assert compared(rows[1:]) == []


@pytest.mark.parametrize(
    ("finish", "said", "brought"),
    [
        (FinishReason.LENGTH, [1, 2], {(3, True): 1}),
        (FinishReason.LENGTH, [1, 9], {(2, False): 1}),
        (FinishReason.LENGTH, [1, 2, 3], {(4, False): 1}),
        (FinishReason.STOP, [1, 2], {}),
        (FinishReason.STOP, [1, 9], {}),
        (FinishReason.CANCELLED, [1, 2, 3], {}),
        (None, [1, 2], {(3, True): 1}),
        (None, [1, 9], {(2, False): 1}),
    ],
)
def test_rows_that_end_before_all_is_known(finish: Any, said: list[int], brought: Any) -> None:
    """A limit cuts off what would have come, and so do steps that leave a row out. What a stop token ended tells
    nothing, as of rounds."""
    one = sequence([])
    one.finish = finish
    assert compared([(one, [1, 2, 3], said)]) == ([Counter(brought)] if brought else [])


def test_several_probes_at_a_time() -> None:
    probes, one, found = Probes(3), sequence([]), list[Counter[tuple[int, bool]]]()
    for number in range(6):
        one.outputs.append(number)
        step = ScheduledStep(number, (one,), (), (), pass_name="x", probes=number % 2 == 0)
        drafts = np.array([[number, number + 1, 99]]) if step.probes else None
        found += probes.took(step, [(one, (number,), None)], Sampled([], probed=drafts))
    assert found == [Counter({(3, False): 1}), Counter({(3, False): 1})], "of the third two tokens are to come"


def test_a_depth_of_one_is_known_at_once() -> None:
    probes, one = Probes(1), sequence([4])
    step = ScheduledStep(1, (one,), (), (), pass_name="x", probes=True)
    assert list(probes.took(step, [(one, (4,), None)], Sampled([], probed=np.array([[4]])))) == [
        Counter({(2, False): 1})
    ]


def test_the_policy_probes_by_its_credit() -> None:
    """Some soon, then one in so many steps as they are dear; none where a step takes no drafts."""
    costs = StepCosts((1,), {4: (1.9,)}, (0.4,))
    limits = speculating(oracle(3, 0), "disabled").scheduler.limits
    policy, decodes = WherePaid(limits, costs), (sequence([]),)
    planned = [policy.of(decodes) for _ in range(1000)]
    assert {one.width for one in planned} == {1}
    probed = [number for number, one in enumerate(planned) if one.probes]
    assert probed[:3] == [0, 4, 8]
    assert len(probed) == pytest.approx((2.0 + 0.003 * 1000) / 0.5, abs=2)
    barred = (sequence([], speculate=False),)
    assert {policy.of(barred) for _ in range(200)} == {Planned(1)}


def test_a_dear_probe_is_made_at_once_or_never() -> None:
    """One that costs more than the stake comes first and seldom again; one that is over what may be lost is not made,
    and the policy says so."""
    limits, decodes = speculating(oracle(3, 0), "disabled").scheduler.limits, (sequence([]),)
    dear = WherePaid(limits, StepCosts((1,), {4: (3.9,)}, (3.0,)))
    probed = [number for number in range(1500) if dear.of(decodes).probes]
    assert probed[0] == 0
    assert 900 < probed[1] < 1100
    assert "not probed" not in str(dear)
    never = WherePaid(limits, StepCosts((1, 2), {4: (3.9, 3.9)}, (4.0, 1.0)))
    assert not any(never.of(decodes).probes for _ in range(3000))
    assert str(never).endswith("; not probed at 1: drafting alone takes over 3.4 plain steps)")
    assert never.of((*decodes, sequence([]))).probes


def test_cheap_probes_of_many_rows_don_t_take_what_is_saved_for_dear_ones_of_one() -> None:
    """A hundred steps of each in turn."""
    limits, costs = speculating(oracle(3, 0), "disabled").scheduler.limits, StepCosts((1, 4), {4: (2, 3)}, (3.0, 0.2))
    policy, alone, crowd = WherePaid(limits, costs), (sequence([]),), tuple(sequence([]) for _ in range(4))
    probed = Counter[int]()
    for _ in range(100):
        for decodes in (alone, crowd):
            probed[len(decodes)] += sum(policy.of(decodes).probes for _ in range(100))
    assert 8 <= probed[1] <= 11, "0.3 % of 10,000 steps"
    assert 78 <= probed[4] <= 96, "0.26 %, of which each takes 0.3 steps"


def test_what_a_drafter_takes_is_known_where_it_is_not_recorded() -> None:
    """By the recording that serves a size; where none does, nothing is probed, and the engine says so."""
    options: dict[str, Any] = {"max_seqs": 4, "max_tokens": 64, "max_len": MAX_LEN, "page_size": 8, "verify": "off"}
    options |= {"speculate": "ngram", "speculate_depth": DEPTH, "speculate_when": "pays", "dtype": torch.float32}

    def policy(key: str, value: Any) -> tuple[LLM, WherePaid]:
        asked = [ask(f"draft_extend.{key}", value, origin="test")]
        llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=EngineOptions(**options), asked=asked)
        width = llm.core.scheduler.width
        assert isinstance(width, WherePaid)
        return llm, width

    llm, found = policy("buckets", (4,))
    costs = measured_costs(llm.executor)
    assert costs is not None
    assert all(0 < one < 100 for one in costs.catching_up)
    llm, found = policy("backend", "disabled")
    told = "not probed at any size, so no round is run: drafting alone takes over 3.4 plain steps"
    assert told in llm.explain()
    assert not any(found.of((sequence([]),)).probes for _ in range(100))
