"""Speculation on a device: steady rounds are one launch without a copy, and no output depends on the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_head import write_random_head

from phonograph import LLM, EngineOptions, SamplingParams, verify
from phonograph.engine.cache.groups import page_bytes
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting
from phonograph.engine.passes.registry import DRAFT, DRAFT_EXTEND, PREFILL, TARGET_VERIFY, kept_by, step_passes_for
from phonograph.engine.passes.target_verify import speculating_passes
from phonograph.engine.requests.request import Request
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import Planned
from phonograph.engine.state.column import Column, Width
from phonograph.graphs.planning.settings import ask


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)
def place(request: pytest.FixtureRequest) -> str:
    """A GPU, and the device that stands in for one, so that no test is run for the first time where time is dear."""
    return str(request.param)


TARGET, DEPTH = SHAPES["tiny"], 3
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_p=0.9, seed=5)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61)), (1, 2, 1, 2, 1)]


def engine(device: str, **changes: Any) -> LLM:
    usual: dict[str, Any] = {"max_seqs": 4, "max_tokens": 64, "max_len": 256, "cache_tokens": 2048}
    usual |= {"dtype": torch.bfloat16, "speculate": "ngram", "speculate_depth": DEPTH, "speculate_when": "always"}
    asked = [ask(f"{TARGET_VERIFY.name}.buckets", (4,), origin="test")]  # one bucket: every round is rounded alike
    return LLM(RandomCheckpoint(TARGET), device=device, options=EngineOptions(**{**usual, **changes}), asked=asked)


def expect_steady_rounds(llm: LLM) -> None:
    core, runner, tables = llm.core, llm.executor.runners[TARGET_VERIFY.name], llm.executor.tables
    for number, prompt in enumerate(PROMPTS[:2]):
        core.add(Request(f"{number}", prompt, replace(GREEDY, max_tokens=200)))
    for _ in range(8):
        core.step()
    is_cuda = llm.device.torch_device.type == "cuda"
    held = torch.cuda.memory_stats()["allocation.all.allocated"] if is_cuda else 0
    before = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    for _ in range(8):
        core.step()
    after = runner.registry.counts.transfers, tables.counts.transfers, runner.stats.replays.total()
    assert after == (*before[:2], before[2] + 8), "one launch a round, and no copy to the device"
    if is_cuda:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == held, "nothing is allocated"
    while not core.is_idle:
        core.step()
    assert all(one.stats.eager.total() == 0 for one in llm.executor.runners.values())


def test_a_steady_round_is_one_launch_and_no_copy(place: str, tmp_path: Path) -> None:
    expect_steady_rounds(engine(place))
    write_random_head(tmp_path, TARGET, 100, torch.bfloat16)
    expect_steady_rounds(engine(place, speculate="eagle", draft=tmp_path))


def run_while_prompts_come(llm: LLM) -> None:
    """A prompt every other step, to the end of all; no step runs eagerly."""
    for number, prompt in enumerate(PROMPTS * 4):
        llm.core.add(Request(f"{number}", prompt, replace(GREEDY, max_tokens=20)))
        llm.core.step()
        llm.core.step()
    while not llm.core.is_idle:
        llm.core.step()
    assert all(one.stats.eager.total() == 0 for one in llm.executor.runners.values())


def expect_drafts_in_one_launch(llm: LLM) -> None:
    runners = llm.executor.runners
    report = verify(runners[DRAFT.name], batches=1)
    assert report.ok, str(report)
    run_while_prompts_come(llm)
    assert runners[DRAFT.name].stats.replays.total() == runners[PREFILL.name].stats.replays.total() > 4


def test_a_step_with_prompts_drafts_in_one_launch(place: str, tmp_path: Path) -> None:
    """While prompts keep coming; and the recordings are right."""
    expect_drafts_in_one_launch(engine(place))
    write_random_head(tmp_path, TARGET, 100, torch.bfloat16)
    for speculate in ("eagle", "ngram+eagle"):
        expect_drafts_in_one_launch(engine(place, speculate=speculate, draft=tmp_path))


def test_a_plain_step_with_prompts_leaves_states_and_drafts_nothing(place: str, tmp_path: Path) -> None:
    write_random_head(tmp_path, TARGET, 100, torch.bfloat16)
    llm = engine(place, speculate="eagle", draft=tmp_path, speculate_when="pays")
    llm.core.scheduler.width = PlainSteps()
    run_while_prompts_come(llm)
    runners = llm.executor.runners
    assert runners[PREFILL.name].stats.replays.total() > 4
    assert runners[DRAFT.name].stats.replays.total() == 0


def test_rounds_among_prompts_are_timed_at_start(place: str, tmp_path: Path) -> None:
    """Nothing is left of it: no count, and requests go on recordings."""
    write_random_head(tmp_path, TARGET, 100, torch.bfloat16)
    for speculate in ("ngram", "eagle"):
        llm = engine(place, speculate=speculate, draft=tmp_path if speculate == "eagle" else None,
                     speculate_when="pays")  # fmt: skip
        assert "among prompts, in plain steps: 4 tokens +" in llm.explain()
        assert not any(one.stats.replays or one.stats.eager.total() for one in llm.executor.runners.values())
        run_while_prompts_come(llm)


class PlainSteps:
    """The protocol `StepWidth`: no rounds; drafts before each step on request."""

    def __init__(self, *, probes: bool = False) -> None:
        self._planned = Planned(1, probes)

    def of(self, decodes: Any, chunks: Any = ()) -> Planned:
        return self._planned if decodes else Planned(1)

    def took(self, step: Any, updates: Any, probed: Any) -> None:
        """Whatever it was."""


def expect_probes(llm: LLM) -> None:
    """Drafts before plain steps come back as the tables have them when the step is launched; one launch more, and
    nothing is allocated for it."""
    core, tables, note, launch = llm.core, llm.executor.tables, llm.core.speculation.note, llm.executor.launch
    core.scheduler.width, runners = PlainSteps(probes=True), llm.executor.runners
    for number, prompt in enumerate(PROMPTS):
        core.add(Request(f"{number}", prompt, replace(GREEDY, max_tokens=120)))
    for _ in range(8):
        core.step()
    is_cuda = llm.device.torch_device.type == "cuda"
    held = torch.cuda.memory_stats()["allocation.all.allocated"] if is_cuda else 0
    before = runners[DRAFT_EXTEND.name].stats.replays.total()
    for _ in range(20):
        core.step()
    assert runners[DRAFT_EXTEND.name].stats.replays.total() == before + 20
    if is_cuda:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == held, "nothing is allocated"
    seen, found = dict[int, list[Any]](), dict[int, list[Any]]()

    def launching(step: Any) -> Any:
        launched = launch(step)
        if step.probes:
            seen[step.number] = tables["draft"].view(-1, DEPTH)[step.decodes.rows].tolist()
        return launched

    def noting(step: Any, updates: Any, sampled: Any) -> Any:
        if step.probes:
            found[step.number] = sampled.probed.tolist()
        return note(step, updates, sampled)

    llm.executor.launch, core.speculation.note = launching, noting  # type: ignore[method-assign]
    while not core.is_idle:
        core.step()
    del seen[max(seen)]  # of the last step no row is left, where steps run ahead
    assert len(seen) > 40
    assert {number: found[number] for number in seen} == seen
    assert core.speculation.counts.probed > 100
    assert all(one.stats.eager.total() == 0 for one in runners.values())


def test_probes_bring_back_what_was_drafted(place: str, tmp_path: Path) -> None:
    expect_probes(engine(place, speculate_when="pays"))
    write_random_head(tmp_path, TARGET, 100, torch.bfloat16)
    for speculate in ("eagle", "ngram+eagle"):
        expect_probes(engine(place, speculate=speculate, draft=tmp_path, speculate_when="pays"))


def test_the_recordings_are_right_narrow_rounds_included(place: str) -> None:
    llm = engine(place, speculate_when="pays")
    report = verify(llm.executor.runners[TARGET_VERIFY.name], batches=1)
    assert report.ok, str(report)
    assert "drafts=half" in {key.axes for key in llm.executor.runners[TARGET_VERIFY.name].captured}
    assert llm.generate(PROMPTS, GREEDY)[0].tokens


def drafts_by_text(
    llm: LLM, prompts: Sequence[tuple[int, ...]], is_looked_at: Callable[[], bool] = lambda: True
) -> dict[tuple[int, ...], list[int]]:
    """What the head drafted after each step, by all tokens of the sequence."""
    core, found = llm.core, dict[tuple[int, ...], list[int]]()
    for number, prompt in enumerate(prompts):
        core.add(Request(f"{number}", prompt, GREEDY))
    while not core.is_idle:
        for sequence, tokens, finish in core.step():
            is_early = len(sequence.outputs) + DEPTH < GREEDY.max_tokens
            if tokens and finish is None and is_early and is_looked_at():
                drafts = core.executor.tables["draft"].view(-1, DEPTH)[sequence.row]
                found[tuple(sequence.known())] = drafts.tolist()
    return found


def test_what_a_head_drafts_does_not_depend_on_the_rows_beside(place: str, tmp_path: Path) -> None:
    """No output tells of a head that reads the wrong rows; tokens a round do."""
    write_random_head(tmp_path, TARGET, 100, torch.float32)
    llm = engine(place, speculate="eagle", draft=tmp_path, dtype=torch.float32, max_ahead=0)
    alone = dict[tuple[int, ...], list[int]]()
    for prompt in PROMPTS:
        alone |= drafts_by_text(llm, [prompt])
    together = drafts_by_text(llm, PROMPTS)
    compared = [text for text in together if text in alone]
    same = sum(together[text] == alone[text] for text in compared)
    assert len(compared) > 100
    assert same >= len(compared) - 2, "but for a tie"


class Stretches:
    """So many plain steps, then two rounds, over and over."""

    def __init__(self, plain: int) -> None:
        self._plain, self._calls, self.width = plain, 0, 1

    def of(self, decodes: Any, chunks: Any = ()) -> Planned:
        self._calls += 1
        self.width = DEPTH + 1 if self._calls % (self._plain + 2) < 2 else 1
        return Planned(self.width)

    def took(self, step: Any, updates: Any, probed: Any) -> None:
        pass


def expect_caught_up(device: str, folder: Path, plain: int) -> None:
    """Drafts after a round are those of an engine whose head never had to catch up."""
    options: dict[str, Any] = {"speculate": "eagle", "draft": folder, "dtype": torch.float32, "max_ahead": 0}
    llm = engine(device, **options)
    always = drafts_by_text(llm, PROMPTS)
    llm.core.scheduler.width = widths = Stretches(plain)
    before = llm.executor.runners[DRAFT_EXTEND.name].stats.replays.total()
    found = drafts_by_text(llm, PROMPTS, lambda: widths.width > 1)
    compared = [text for text in found if text in always and len(text) > plain + 5]
    same = sum(found[text] == always[text] for text in compared)
    assert llm.executor.runners[DRAFT_EXTEND.name].stats.replays.total() > before
    assert len(compared) >= 2
    assert same >= 0.9 * len(compared), "but for a tie"


@pytest.mark.parametrize("plain", [3, 31, 40])
def test_a_head_catches_up_with_plain_steps(place: str, tmp_path: Path, plain: int) -> None:
    """Fewer than there are places for, and more."""
    write_random_head(tmp_path, TARGET, 100, torch.float32)
    expect_caught_up(place, tmp_path, plain)


def test_layers_of_a_head_are_part_of_every_page(place: str, tmp_path: Path) -> None:
    write_random_head(tmp_path, TARGET, 100, torch.bfloat16)
    head = engine(place, speculate="eagle", draft=tmp_path, cache_tokens=2048)
    assert head.drafting is not None
    assert head.drafting.keeps is not None
    model, passes = head.executor.model, speculating_passes(head.drafting)
    both = page_bytes(kept_by(model, passes), 16, model.dtype)
    assert both > page_bytes(kept_by(model), 16, model.dtype)
    held = sum(
        tensor.numel() * tensor.element_size() for group in head.executor.state.caches for tensor in group.tensors
    )
    assert held == both * head.limits.num_pages


class Told:
    """Drafts what a column says, or zeros where there is none."""

    writes = ()

    def __init__(self, parts: PassParts, name: str) -> None:
        self.reads = (name,)
        self._told, self._tables = parts.tables[name], parts.tables

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        rows = accepted.rows[:, None]
        places = self._tables.length[rows] + 1 + torch.arange(depth, device=rows.device)
        return self._told[rows, places.clamp_max(self._told.shape[1] - 1)]

    def keep_up(self, accepted: Accepted) -> None:
        pass


def answers(llm: LLM, params: SamplingParams, known: dict[tuple[int, ...], list[int]]) -> tuple[list[list[int]], int]:
    """All prompts at once, at one bucket and width, with drafts of what is known; and how many were accepted."""

    def told(entry: Any) -> list[int]:
        prompt = entry.sequence.request.prompt
        return [*prompt, *known.get(prompt, [])]

    column = Column("told", torch.int64, width=Width.POSITIONS, value=told)
    passes = speculating_passes(Drafting("told", DEPTH, lambda parts: Told(parts, "told"), lambda: (column,)))
    executor = Executor(llm.executor.model, llm.executor.parts.sampler, llm.device, llm.plan, llm.limits, passes=passes)
    executor.capture()
    core = EngineCore(Scheduler(llm.limits, passes=step_passes_for(speculates=True), prefix_cache=False), executor)
    found = [core.add(Request(f"{n}", prompt, params))[0] for n, prompt in enumerate(PROMPTS)]
    while not core.is_idle:
        core.step()
    assert executor.runners[TARGET_VERIFY.name].stats.eager.total() == 0
    return [one.outputs for one in found], sum(core.speculation.counts.accepted)


def expect_the_same_of_any_drafter(llm: LLM, params: SamplingParams) -> None:
    """Of one that is never right, and of one that knows what the first brought."""
    nonsense, few = answers(llm, params, {})
    good, many = answers(llm, params, dict(zip(PROMPTS, nonsense, strict=True)))
    assert many > 4 * few
    assert good == nonsense


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_good_and_a_nonsense_drafter_say_the_same_in_bfloat16(place: str, params: SamplingParams) -> None:
    """At a fixed bucket and width: four rows of four tokens throughout."""
    llm = engine(place, max_seqs=4, max_ahead=0)
    expect_the_same_of_any_drafter(llm, params)
