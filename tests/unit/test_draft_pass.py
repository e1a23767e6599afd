"""The pass `draft`: all that a mixed step has to draft is one launch, and what the drafter says when asked eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_head import write_random_head

from drafted import GREEDY, PROMPTS, REQUESTS
from phonograph import LLM, DeclarationError, EmulatedDevice, EngineOptions, SamplingParams, verify
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.mtp import MtpCheckpoint
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.reproducer import Reproducer
from phonograph.engine.execution.rerun import rerun
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.draft import DraftSample
from phonograph.engine.passes.drafted_rounds import DraftedRounds
from phonograph.engine.passes.drafting import Accepted, Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.mtp import mtp
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.ngram_eagle import ngram_eagle
from phonograph.engine.passes.registry import DRAFT, PREFILL, TARGET_VERIFY, phases_of
from phonograph.engine.passes.rounds import PickedPlaces
from phonograph.engine.passes.step import Step
from phonograph.engine.passes.target_verify import speculating_passes
from phonograph.engine.requests.limits import half_width
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.phases.decisions import Reason
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.running.runner_options import facts_of
from random_modules import written
from speculation import MAX_LEN, Driver, Switching, check, oracle, plain, plain_llm, speculating

TARGET = SHAPES["tiny"]
DEPTH = 3
SLOW = pytest.mark.slow
DRAFTERS = ["ngram", *(pytest.param(name, marks=SLOW) for name in ("eagle", "ngram+eagle", "mtp"))]


@pytest.fixture
def drafting(request: pytest.FixtureRequest, tmp_path: Path) -> Drafting:
    """By its name."""
    if request.param == "ngram":
        return ngram(DEPTH)
    model, most = drafted_for(plain_llm().executor.model), MAX_LEN + 16
    if request.param == "mtp":
        return mtp(MtpCheckpoint.open(written(tmp_path / "modules"), TARGET).load(model, most, DEPTH), DEPTH)
    write_random_head(tmp_path / "head", TARGET, 100, torch.float32)
    head = DraftCheckpoint.open(tmp_path / "head", TARGET).load(model, most)
    return (eagle if request.param == "eagle" else ngram_eagle)(head, DEPTH)


every_drafter = pytest.mark.parametrize("drafting", DRAFTERS, indirect=True)


def of_draft(core: EngineCore[Executor]) -> Runner:
    return core.executor.runners[DRAFT.name]


@pytest.mark.faults
@every_drafter
def test_a_pass_that_raises_costs_drafts_and_no_token(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a drafter that raises does: tokens are picked before."""
    core, fails = speculating(drafting, "disabled"), iter(range(10_000))

    def run(batch: PickedPlaces) -> object:
        if next(fails) % 2:
            raise RuntimeError("no memory for drafts")
        return served(batch)

    served = of_draft(core).run
    monkeypatch.setattr(of_draft(core), "run", run)
    check(Driver(core, every=1).run(REQUESTS[:6]))
    assert "draft failed, and its rows go on as they are: RuntimeError: no memory for drafts" in caplog.text


# -- one launch -----------------------------------------------------------------------------------------------


@every_drafter
@pytest.mark.parametrize(
    "backend", ["full", *(pytest.param(name, marks=SLOW) for name in ("breakable", "tc_piecewise"))]
)
def test_a_mixed_step_drafts_in_one_launch(drafting: Drafting, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While prompts keep coming: tokens are those of plain decoding, and nothing runs eagerly."""
    core, launch, found = speculating(drafting, backend), Executor.launch, list[tuple[str, int, int]]()

    def noting(executor: Executor, step: Step) -> Any:
        before = of_draft(core).stats.replays.total()
        launched = launch(executor, step)
        picks = len(step.decodes.rows) + sum(chunk.samples for chunk in step.prefills)
        if executor is core.executor:
            found.append((step.pass_name, picks, of_draft(core).stats.replays.total() - before))
        return launched

    monkeypatch.setattr(Executor, "launch", noting)
    check(Driver(core, every=1).run(REQUESTS * 2))
    assert all(num == (name == PREFILL.name and picks > 0) for name, picks, num in found)
    assert sum(num for *_, num in found) > 10
    assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


@every_drafter
def test_the_recordings_are_right(drafting: Drafting) -> None:
    runner = of_draft(speculating(drafting, narrows=True))
    assert {key.axes for key in runner.captured} == {"", "drafts=half", "drafts=off"}
    report = verify(runner, batches=2)
    assert report.ok, report


# -- what is drafted ------------------------------------------------------------------------------------------


class OpByOp:
    """Drafts for rounds, then for rows whose prompts ended, each of its own width: nothing is recorded or padded."""

    def __init__(self, parts: PassParts, drafting: Drafting) -> None:
        self._tables = parts.tables
        self._rounds = DraftedRounds(parts, drafting.make(parts))

    def draft(self, batch: PickedPlaces) -> None:
        rows, firsts, lasts = (torch.as_tensor(one) for one in (batch.rows, batch.firsts, batch.lasts))
        is_round = torch.arange(len(rows)) < (batch.tokens.shape[0] - len(rows)) // max(1, batch.tokens_per_row - 1)
        for these, width in ((is_round, batch.tokens_per_row), (~is_round, 1)):
            own, starts = rows[these], batch.positions[firsts[these]]
            if not len(own):
                continue
            assert torch.equal(lasts[these] - firsts[these], torch.full_like(own, width - 1))
            places = firsts[these, None] + torch.arange(width)
            features = None if batch.features is None else batch.features[places].flatten(0, 1)
            counts = self._tables.length[own] - starts
            assert width > 1 or batch.tokens_per_row == 1 or bool((counts == 1).all())
            table = self._tables.pages[:, : batch.width]
            accepted = Accepted(own, starts, batch.tokens[places], counts, table, features)
            self._rounds.draft(accepted, batch.tokens_per_row - 1)


def compared(core: EngineCore[Executor], drafting: Drafting, seen: list[tuple[int, int]]) -> Callable[[Any], Any]:
    """`Runner.run` of the draft pass, which leaves what eager drafting leaves; notes rows, and how wide rounds are."""
    executor, run = core.executor, of_draft(core).run
    tables, by_hand = executor.tables, OpByOp(executor.parts, drafting)
    memory = [tensor for group in executor.state.caches for tensor in group.tensors]
    columns = [tables[name] for name in executor.passes[DRAFT.name].writes]

    def running(batch: PickedPlaces, **kwargs: Any) -> Any:
        before = [tensor.clone() for tensor in (*memory, *columns)]
        by_hand.draft(batch)
        wanted = [column.clone() for column in columns]
        for tensor, values in zip((*memory, *columns), before, strict=True):
            tensor.copy_(values)
        result = run(batch, **kwargs)
        for column, values in zip(columns, wanted, strict=True):
            torch.testing.assert_close(column[1:], values[1:], rtol=1e-4, atol=1e-4)
        seen.append((len(batch.rows), batch.tokens_per_row))
        return result

    return running


@every_drafter
@pytest.mark.parametrize("widths", [(4,), pytest.param((1, 2, 4), marks=SLOW)], ids=str)
def test_drafts_are_those_of_the_drafter_called_eagerly(
    drafting: Drafting, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, from the same tensors; and so is all else that it keeps in columns."""
    core, seen = speculating(drafting, narrows=len(widths) > 1), list[tuple[int, int]]()
    core.scheduler.width = Switching(widths)
    monkeypatch.setattr(of_draft(core), "run", compared(core, drafting, seen))
    check(Driver(core, every=2).run(REQUESTS * 2))
    assert {width for _, width in seen} == {*widths}
    assert max(count for count, _ in seen) > 2
    assert of_draft(core).stats.eager.total() == 0
    assert half_width(DEPTH + 1) == 2


def test_drafts_of_mixed_steps_are_accepted() -> None:
    """With a drafter that is always right, rounds after mixed steps bring all of their tokens."""
    core = speculating(oracle(DEPTH, 0), max_ahead=0)
    check(Driver(core, every=2).run([(prompt, GREEDY) for prompt in PROMPTS]))
    counts = core.speculation.counts
    assert counts.accepted == counts.drafted


# -- where no recording serves --------------------------------------------------------------------------------


@pytest.mark.parametrize(("speculate", "drafts"), [(False, False), (None, True)])
def test_nothing_is_drafted_for_requests_that_take_no_drafts(speculate: bool | None, drafts: bool) -> None:
    """Prompts alone in their steps too."""
    core = speculating(oracle(DEPTH, 20), "full", prefix_cache=False)
    wanted = replace(GREEDY, max_tokens=4, speculate=speculate)
    check(Driver(core, every=12).run([(prompt, wanted) for prompt in PROMPTS[:3]]))
    replays = core.executor.runners[DRAFT.name].stats.replays
    assert bool(sum(count for key, count in replays.items() if not key.axes)) == drafts
    assert not core.executor.runners[DRAFT.name].stats.eager


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6, 16])
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_samples_of_rounds_stay_in_the_pages_of_their_rows(depth: int, page_size: int) -> None:
    """Whatever fits into a page: recordings are compared with the eager path on nothing that rows share."""
    parts = speculating(oracle(depth, 0), "disabled", page_size=page_size, num_pages=200, max_len=48).executor.parts
    trials, width = parts.trials, depth + 1
    assert trials.num_rows == 4
    sample = DraftSample(parts, width, None)
    with trials.running(None):
        pages, lengths = parts.tables.pages, parts.tables.length[1:5]
        last = (int(lengths.max()) + 2 * width - 2) // page_size
        assert int(lengths.min()) >= page_size
        own = pages[1:5, 1 : last + 1].flatten().tolist()
        assert len({*own}) == len(own), "no page of one row is another's"
        assert min(own) > 1
        for seed in range(20):
            extent = Extent({"seqs": 4, "places": 4 * width}, {"seqs": 4, "places": 4 * width})
            batch = sample(extent, seed)
            starts = batch.positions[batch.firsts]
            assert page_size <= starts.min()
            assert (starts.max() + 2 * width - 2) // page_size <= trials.width
            assert (pages[1:5, (starts.max() + 2 * width - 2) // page_size] > 1).all()


@pytest.mark.parametrize("page_size", [2, pytest.param(4, marks=SLOW), pytest.param(8, marks=SLOW)])
def test_heads_start_with_small_pages(page_size: int, tmp_path: Path) -> None:
    """Verification at start found a page that several rows wrote to."""
    write_random_head(tmp_path / "head", TARGET, 100, torch.float32)
    options = EngineOptions(
        max_seqs=4, max_tokens=32, max_len=MAX_LEN, page_size=page_size, speculate="eagle", draft=tmp_path / "head",
        dtype=torch.float32, speculate_depth={2: 1, 4: 3, 8: 7}[page_size],
    )  # fmt: skip
    llm = LLM(RandomCheckpoint(TARGET), device="emulated", options=options)
    assert [tuple(one.tokens) for one in llm.generate([list(prompt) for prompt in PROMPTS], GREEDY)] == [
        plain(prompt, GREEDY).tokens for prompt in PROMPTS
    ]


def test_more_rows_than_recordings_have_are_drafted_for_eagerly() -> None:
    options = EngineOptions(
        max_seqs=4, max_tokens=32, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate="ngram", max_ahead=0
    )
    asked = [ask(f"{DRAFT.name}.limit", 1, origin="test")]
    core = LLM(RandomCheckpoint(TARGET), device="emulated", options=options, asked=asked).core
    check(Driver(core, every=1).run([(prompt, replace(GREEDY, max_tokens=8)) for prompt in PROMPTS]))
    stats = of_draft(core).stats
    assert set(stats.eager) == {Reason.TOO_LARGE}
    assert stats.replays.total() > 0
    assert "the largest bucket is 1" in stats.details[Reason.TOO_LARGE]
    assert f"{DRAFT.name}" in core.executor.runners[DRAFT.name].explain()


def test_what_is_not_recorded_is_counted() -> None:
    core = speculating(ngram(DEPTH), "disabled")
    check(Driver(core, every=2).run(REQUESTS[:4]))
    assert set(of_draft(core).stats.eager) == {Reason.DISABLED}


def test_a_pass_and_the_one_after_it_come_together() -> None:
    passes = [one for one in speculating_passes(ngram(DEPTH)) if one.name != DRAFT.name]
    llm, device = plain_llm(), EmulatedDevice()
    limits, plan = replace(llm.limits, tokens_per_row=DEPTH + 1), resolve([], facts_of(device), phases_of(passes))
    with pytest.raises(DeclarationError, match=r"'prefill' is followed by 'draft', and this engine has target_verify"):
        Executor(llm.executor.model, TorchSampler(), device, plan, limits, passes=passes)
    draft = speculating(ngram(DEPTH), "disabled").executor.passes[DRAFT.name]
    with pytest.raises(DeclarationError, match=r"step 3 names the pass 'draft', which takes what another one hands"):
        draft.batch(Step(3, DRAFT.name))


# -- checks in service ----------------------------------------------------------------------------------------


def checked(tmp_path: Path, **options: Any) -> LLM:
    write_random_head(tmp_path / "head", TARGET, 100, torch.float32)
    usual: dict[str, Any] = {"max_seqs": 4, "max_tokens": 32, "max_len": MAX_LEN, "page_size": 8, "max_ahead": 1}
    usual |= {"speculate": "eagle", "draft": tmp_path / "head", "dtype": torch.float32, "shadow_verify": 1.0}
    made = EngineOptions(**usual | options)
    return LLM(RandomCheckpoint(TARGET), device="emulated", options=made)


@SLOW
def test_all_replays_of_a_step_are_checked(tmp_path: Path) -> None:
    llm = checked(tmp_path)
    check(Driver(llm.core, every=2).run(REQUESTS))
    shadow, runners = llm.executor.shadow, llm.executor.runners
    assert shadow is not None
    assert shadow.num_wrong == 0
    assert shadow.num_checked == sum(runners[name].stats.replays.total() for name in runners)
    assert runners[DRAFT.name].stats.replays.total() > 5


class _Spoiled:
    """A recording after whose replay something else happens."""

    def __init__(self, recording: Any, spoil: Callable[[], object]) -> None:
        self._recording, self._spoil = recording, spoil

    def replay(self) -> None:
        self._recording.replay()
        self._spoil()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recording, name)


@pytest.mark.faults
@SLOW
def test_a_wrong_recording_is_found_and_changes_no_output(tmp_path: Path) -> None:
    """Its step is undone as a whole, and computed again; the file runs again, and nothing is wrong with the others."""
    llm = checked(tmp_path, shadow_dir=tmp_path / "found", shadow_tokens=True)
    runner, drafts = llm.executor.runners[DRAFT.name], llm.executor.tables["draft"]
    for key in runner.captured:
        if key.size == 2 and not key.axes:
            entry = runner._entries[key]
            entry.recording = _Spoiled(entry.recording, lambda: drafts[1:].add_(1))  # type: ignore[assignment]
    check(Driver(llm.core, every=1).run(REQUESTS))
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_wrong == 1
    assert set(runner.stats.eager) == {Reason.MISTRUSTED}
    (path,) = (tmp_path / "found").iterdir()
    other = checked(tmp_path, shadow_verify=0.0)
    assert rerun(other.executor, Reproducer.read(path)).mismatch is None


@pytest.mark.parametrize("name", [TARGET_VERIFY.name, DRAFT.name])
def test_a_sampled_text_is_that_of_plain_decoding(name: str) -> None:
    """Whichever of the two passes that draft is not recorded."""
    options = EngineOptions(
        max_seqs=4, max_tokens=32, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate="ngram"
    )
    asked = [ask(f"{name}.backend", "disabled", origin="test")]
    core = LLM(RandomCheckpoint(TARGET), device="emulated", options=options, asked=asked).core
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
    check(Driver(core, every=1).run([(prompt, params) for prompt in PROMPTS]))
    runners = core.executor.runners
    assert {one for one, runner in runners.items() if runner.stats.eager.total()} == {name}
