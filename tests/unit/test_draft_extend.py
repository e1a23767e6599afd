"""The pass `draft_extend`: plain steps leave states and tokens, and a drafter reads them later, all at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from random_head import write_random_head

from drafted import PROMPTS, REQUESTS
from drafters import TARGET, engine, every_drafter, made
from mixed_steps import DEPTH, PLACES, SCRIPTS, Played, looked_up
from phonograph import LLM, EngineOptions, SamplingParams, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.ops.kernels import ReadMarks, RoundKernels, Unread
from phonograph.engine.ops.layers.rounds import ReferenceRounds
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.drafted_rounds import DraftedRounds
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.registry import DRAFT, DRAFT_EXTEND, PREFILL, TARGET_VERIFY
from phonograph.engine.passes.step import Step
from phonograph.engine.passes.unread import NAMES, READ_TO
from phonograph.engine.requests.limits import UNREAD_PLACES, Limits
from phonograph.engine.requests.request import Request
from phonograph.engine.scheduling.catching_up import CatchingUp
from speculation import MAX_LEN, Driver, Switching, check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW = pytest.mark.slow


@pytest.fixture
def drafting(request: pytest.FixtureRequest, tmp_path: Path) -> Drafting:
    return made(request.param, tmp_path)


@dataclass
class Noted:
    """The steps that an engine launched."""

    core: EngineCore[Executor]
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        launch = self.core.executor.launch

        def noting(step: Step) -> Any:
            self.steps.append(step)
            return launch(step)

        self.core.executor.launch = noting  # type: ignore[method-assign]


# -- when -----------------------------------------------------------------------------------------------------


def due(places: int, *steps: tuple[int, bool]) -> list[bool]:
    """Of steps, each by its width and whether it has decodes."""
    limits = Limits(2, 99, 64, 8, 99, tokens_per_row=4, unread_places=places)
    found = CatchingUp(limits)
    return [found.is_due(width, [1] if decodes else []) for width, decodes in steps]


PLAIN, ROUND, PROMPTS_ALONE, PLAIN_PROMPTS_ALONE = (1, True), (4, True), (4, False), (1, False)


def test_a_drafter_catches_up_before_rounds_and_when_it_must() -> None:
    """Prompts among them or not."""
    assert due(3, PLAIN, PLAIN, ROUND, ROUND) == [False, False, True, False]
    assert due(3, *[PLAIN] * 8) == [False, False, False, True, False, False, True, False]
    assert due(3, *[PLAIN] * 3, ROUND, PLAIN, ROUND) == [False, False, False, True, False, True]


def test_one_that_reads_every_token_catches_up_before_rounds_alone() -> None:
    assert due(0, *[PLAIN] * 40, ROUND, ROUND) == [False] * 40 + [True, False]


def test_steps_without_decodes_read_nothing() -> None:
    """In a round, ends of prompts are read and drafted for at once; in a plain step they are left."""
    assert due(3, PLAIN, PROMPTS_ALONE, ROUND) == [False, False, True]
    assert due(3, PROMPTS_ALONE, ROUND) == [False, False]
    assert due(3, PLAIN_PROMPTS_ALONE, ROUND, ROUND) == [False, True, False]
    assert due(3, *[PLAIN] * 3, *[PLAIN_PROMPTS_ALONE] * 2, PLAIN, PLAIN) == [False] * 5 + [True, False]
    assert not CatchingUp(Limits(2, 99, 64, 8, 99)).is_due(1, [1])


# -- what -----------------------------------------------------------------------------------------------------


@every_drafter
@pytest.mark.parametrize(
    "backend", ["full", *(pytest.param(name, marks=SLOW) for name in ("breakable", "tc_piecewise", "disabled"))]
)
def test_tokens_are_those_of_plain_decoding(drafting: Drafting, backend: str) -> None:
    """Long stretches of plain steps, rounds between them, prompts among both; second turns too."""
    core = engine(drafting, backend)
    core.scheduler.width, noted = Switching((1, 1, 1, 1, 1, DEPTH + 1), every=2), Noted(core)
    driver = Driver(core)
    check(driver.run(REQUESTS))
    check(driver.run(REQUESTS[::-1]))
    assert any(step.catches_up for step in noted.steps)
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


@every_drafter
def test_the_recordings_are_right(drafting: Drafting) -> None:
    core = engine(drafting)
    runners = core.executor.runners
    for name in (DRAFT_EXTEND.name, TARGET_VERIFY.name, PREFILL.name, DRAFT.name):
        report = verify(runners[name], batches=2)
        assert report.ok, report
    assert {key.axes for key in runners[DRAFT_EXTEND.name].captured} == {"", "drafts=off"}
    leaves = drafting.unread is not None
    assert {key.axes for key in runners[DRAFT.name].captured} == ({""} if leaves else {"", "drafts=off"})


@every_drafter
def test_a_steady_plain_step_is_one_launch(drafting: Drafting) -> None:
    """And no copy, while nothing has to be read; a pass that reads comes once in so many steps."""
    core = engine(drafting, reserve_tokens=MAX_LEN)
    core.scheduler.width, noted = Switching((1,)), Noted(core)
    core.add(Request("a", PROMPTS[0], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    for _ in range(4):
        core.step()
    noted.steps.clear()
    runners = core.executor.runners
    before = {name: one.stats.replays.total() for name, one in runners.items()}
    for _ in range(3 * PLACES):
        core.step()
    grown = {name: one.stats.replays.total() - before[name] for name, one in runners.items()}
    reads = sum(step.catches_up for step in noted.steps)
    assert reads == (0 if drafting.unread is None else 3)
    assert grown == {**dict.fromkeys(runners, 0), TARGET_VERIFY.name: 3 * PLACES, DRAFT_EXTEND.name: reads}


@every_drafter
@pytest.mark.parametrize("name", ["several", "full before it", "without decodes"])
def test_a_plain_step_among_prompts_is_one_launch(drafting: Drafting, name: str) -> None:
    """What is to be read is left in it, and read before a round or when no place is left; a lookup reads at once."""
    leaves = drafting.unread is not None
    core = engine(drafting, max_ahead=0, prefix_cache=False, chunk=7)
    played = Played(core, None if leaves else looked_up).play(SCRIPTS[name])
    steps = zip(played.steps, played.replays, strict=True)
    plain = [one for one in steps if one[0].pass_name == PREFILL.name and one[0].tokens_per_row == 1]
    assert plain
    for step, grown in plain:
        picks = bool(step.decodes.rows.size) or any(chunk.samples for chunk in step.prefills)
        wanted = {PREFILL.name: 1, DRAFT.name: int(picks and not leaves), DRAFT_EXTEND.name: int(step.catches_up)}
        assert grown == {**dict.fromkeys(grown, 0), **wanted}
    assert any(step.catches_up for step, _ in plain) == (leaves and name == "full before it")
    assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


@pytest.mark.faults
@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
def test_a_pass_that_raises_costs_drafts_and_no_token(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = engine(drafting, "disabled")
    core.scheduler.width = Switching((1, 1, DEPTH + 1), every=2)

    def run(batch: Any) -> object:
        raise RuntimeError("no memory to read")

    monkeypatch.setattr(core.executor.runners[DRAFT_EXTEND.name], "run", run)
    check(Driver(core).run(REQUESTS[:6]))
    assert "draft_extend failed, and its rows go on as they are: RuntimeError: no memory to read" in caplog.text


def test_a_row_that_left_nothing_keeps_its_drafts(tmp_path: Path) -> None:
    """Those that its prompt's end brought, while others catch up; and all are read then."""
    drafting = made("eagle", tmp_path)
    core = engine(drafting, "disabled", prefix_cache=False, max_ahead=0)
    core.scheduler.width = Switching((1,))
    asked = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    sequences = [core.add(Request(f"{number}", prompt, asked))[0] for number, prompt in enumerate(PROMPTS[:2])]
    for _ in range(4):
        core.step()
    tables = core.executor.tables
    drafts, first, second = tables["draft"].view(-1, DEPTH), sequences[0].row, sequences[1].row
    drafts[second], drafts[first] = torch.tensor([7, 8, 9]), torch.tensor([7, 8, 9])
    tables[READ_TO][second] = tables.length[second]
    parts = core.executor.parts
    DraftedRounds(parts, drafting.make(parts), drafting.unread).extend(
        torch.tensor([first, second, 0]), tables.pages, DEPTH
    )
    assert drafts[second].tolist() == [7, 8, 9]
    assert drafts[first].tolist() != [7, 8, 9]
    assert torch.equal(tables[READ_TO][[first, second]], tables.length[[first, second]])


def test_a_new_row_has_nothing_to_be_read(tmp_path: Path) -> None:
    """Whatever its last owner left."""
    core = engine(made("eagle", tmp_path), "disabled", prefix_cache=False)
    core.scheduler.width = Switching((1,))
    read_to, length = core.executor.tables[READ_TO], core.executor.tables.length
    for number in range(6):
        core.add(Request(f"{number}", PROMPTS[number % 4], SamplingParams(max_tokens=9, temperature=0.0)))
        core.step()
        while not core.is_idle:
            core.step()
            assert bool(((length - read_to)[1:] <= PLACES).all())


def test_engines_have_places_where_a_drafter_reads_hidden_states(tmp_path: Path) -> None:
    write_random_head(tmp_path, TARGET, 100, torch.float32)
    usual: dict[str, Any] = {"max_seqs": 2, "max_tokens": 32, "max_len": 96, "dtype": torch.float32}

    def opened(**changes: Any) -> LLM:
        return LLM(RandomCheckpoint(TARGET), device="emulated", options=EngineOptions(**usual, **changes))

    plain, ngrams, head = opened(), opened(speculate="ngram"), opened(speculate="eagle", draft=tmp_path)
    assert [one.limits.unread_places for one in (plain, ngrams, head)] == [0, 0, UNREAD_PLACES]
    assert head.drafting is not None
    assert head.drafting.unread is not None
    names = {column.name for column in head.executor.tables.columns}
    assert names.issuperset(NAMES)
    asked = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    answers = [one.generate([[5, 9, 200, 3]], asked)[0].tokens for one in (plain, head)]
    assert answers[0] == answers[1]


# -- kernels --------------------------------------------------------------------------------------------------


def unread(num_rows: int, places: int, taps: int, width: int) -> Unread:
    numbers = torch.Generator().manual_seed(num_rows + places)
    states = torch.randn(num_rows + 1, places, taps, width, generator=numbers)
    tokens = torch.randint(0, 99, (num_rows + 1, places), generator=numbers)
    read_to = torch.randint(0, 20, (num_rows + 1,), generator=numbers)
    return Unread(states.to(DEVICE), tokens.to(DEVICE), read_to.to(DEVICE))


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def copied(one: Unread) -> Unread:
    return Unread(one.states.clone(), one.tokens.clone(), one.read_to.clone())


def kernels_of_rounds() -> RoundKernels:
    pytest.importorskip("triton")
    from phonograph.engine.ops.triton.rounds import TritonRounds

    return TritonRounds()


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize(("places", "width"), [(2, 8), (6, 24), (32, 40)])
def test_kernels_leave_and_take_what_the_reference_does(taps: int, places: int, width: int) -> None:
    kernels, reference = kernels_of_rounds(), ReferenceRounds()
    ring = unread(5, places, taps, width)
    ours, theirs = copied(ring), copied(ring)
    length, last_token = whole(0, 9, 3, 25, 19, 41), whole(0, 11, 12, 13, 14, 15)
    rows, positions, after = whole(3, 0, 1, 1, 5, 5, 5), whole(7, 0, 9, 10, 40, 41, 30), whole(-1, -1, 7, -1, -1, -1, 3)
    mixed, plain = Queries(rows, positions, length[:, None], None), whole(4, 0, 2)
    by_row = Queries(plain, length, length[:, None], 1, by_row=True)
    states = [torch.randn(7, width, device=DEVICE) for _ in range(taps)]
    both: list[tuple[RoundKernels, Unread]] = [(kernels, ours), (reference, theirs)]
    for run, left in both:
        run.leave(left, mixed, positions + 50, states, after)
        run.leave(left, by_row, last_token, [state[:3] for state in states])
    for one, other in zip(vars(ours).values(), vars(theirs).values(), strict=True):
        assert torch.equal(one[1:], other[1:])
    rows = whole(1, 0, 2, 3, 4, 5)
    found, wanted = (run.left(left, rows, length, last_token) for run, left in both)
    assert torch.equal(found.counts, wanted.counts)
    real = rows > 0
    for one, other in zip((found.starts, found.tokens), (wanted.starts, wanted.tokens), strict=True):
        assert torch.equal(one[real], other[real])
    for one, other in zip(found.taps, wanted.taps, strict=True):
        shape = len(rows), places, width
        assert torch.equal(one.view(shape)[real], other.view(shape)[real])


def test_what_a_row_left_comes_in_order_with_the_tokens_after() -> None:
    """From the end of its prompt on, which a mixed step had; then plain steps, and nothing of what was before."""
    ring, states = unread(2, 4, 1, 8), torch.randn(9, 8, device=DEVICE)
    ring.read_to[2], table, length, last_token = 1 << 60, whole(0, 0, 0)[:, None], whole(0, 6, 9), whole(0, 7, 40)
    prompt = Queries(whole(1, 2, 2, 2), whole(5, 6, 7, 8), table, None)
    kernels = ReferenceRounds()
    kernels.leave(ring, prompt, whole(35, 36, 37, 38), [states[5:]], whole(-1, 37, 38, -1))
    assert ring.read_to[2] == 8
    for position in (9, 10):
        by_row = Queries(whole(2, 0), length, table, 1, by_row=True)
        kernels.leave(ring, by_row, last_token, [states[[position - 9, 0]]])
        length[2], last_token[2] = position + 1, 32 + position
    found = kernels.left(ring, whole(0, 2), length, last_token)
    assert [found.counts[1], found.starts[1]] == [3, 8]
    assert found.tokens[1, :3].tolist() == [40, 41, 42]
    assert torch.equal(found.taps[0].view(2, 4, 8)[1, :3], states[[8, 0, 1]])


def test_kernels_mark_rows_as_read() -> None:
    length, rows = whole(0, 7, 9, 11), whole(3, 0, 1)
    found = [whole(-5, -5, -5, -5) for _ in range(2)]
    for kernels, read_to in zip((kernels_of_rounds(), ReferenceRounds()), found, strict=True):
        drafts = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
        kernels.keep_drafts(drafts, rows, torch.ones_like(rows)[:, None], ReadMarks(read_to, length))
        assert drafts[[1, 3]].tolist() == [[1, -1], [1, -1]]
        assert read_to[1:].tolist() == [7, -5, 11]
