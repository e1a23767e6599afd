"""tc_piecewise at a start: how often pieces and body run, what is compared, whose facts are found, what is verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from phonograph import LLM, Phase, PhasePlan, Runner, Slot, Stage, current, graphed, opaque
from phonograph.devices import EmulatedDevice
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.kinds import BackendName
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.recording.backends.compilers import COMPILERS
from phonograph.graphs.running.runner_options import RunnerOptions
from phonograph.graphs.trust.verify import verify_some

SIZES = (1, 2, 4, 8)


class Case:
    """A runner of a phase that says what it writes, as the engine's do."""

    def __init__(
        self,
        backend: BackendName = "tc_piecewise",
        factor: Callable[[int], float] = lambda rows: 1.0,
        tail: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        **options: Any,
    ) -> None:
        self.weight, self.written = torch.arange(1.0, 5.0), torch.zeros(8, 4)
        self.failing: int | None = None
        """A number of rows that runs from the second on have no room for."""
        self.runs: Counter[tuple[Stage, int]] = Counter()
        """By stage and number of rows."""

        def store(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
            self.runs[current().stage, len(x)] += 1
            if len(x) == self.failing and self.runs[Stage.WARMING, len(x)] > 1:
                raise MemoryError("no room")
            written[: len(x)] = x
            return x * 2

        stored = opaque(store, fake=lambda x, written: torch.empty_like(x), mutates=("written",))

        def body(batch: dict[str, Any]) -> torch.Tensor:
            x = batch["x"]
            return tail(stored(x * self.weight * factor(x.shape[0]), self.written))

        phase = Phase(
            "p",
            body=body,
            slots=[Slot("x", ("seqs", 4), torch.float32)],
            bucketed="seqs",
            preserve=self._preserve,
            sample=lambda extent, seed: {"x": torch.ones(extent.used["seqs"], 4) * (seed + 1)},
        )
        plan = PhasePlan(backend=backend, buckets=SIZES)
        device = EmulatedDevice()
        device.capabilities = replace(device.capabilities, compilers=frozenset(COMPILERS))
        self.runner = Runner(phase, device, plan, options=RunnerOptions(**options))

    @contextmanager
    def _preserve(self, batch: Any) -> Iterator[dict[str, torch.Tensor]]:
        before = self.written.clone()
        yield {"written": self.written}
        self.written.copy_(before)


def test_facts_are_of_the_body_also_where_the_phase_says_what_it_writes() -> None:
    """Rehearsals run pieces, which read nothing of what the body does."""
    found = {}
    backends: tuple[BackendName, ...] = ("breakable", "tc_piecewise")
    for backend in backends:
        case = Case(backend, facts="verify")
        case.runner.capture()
        found[backend] = {(fact.kind, fact.name) for fact in case.runner.stale.facts}
        assert case.runner.stale.find() is None
        case.weight = torch.zeros(4)
        assert case.runner.stale.find() is not None
    assert found["tc_piecewise"] == found["breakable"]


class Scale:
    value = 2.0


@pytest.mark.parametrize("guarded", ["all", "ends"])
def test_what_only_a_program_between_reads_is_a_fact(guarded: str) -> None:
    scale = Scale()
    case = Case(factor=lambda rows: scale.value if rows == 4 else 1.0, facts="check", guarded=guarded, guard="off")
    assert not case.runner.capture().failures
    assert case.runner.stale.find() is None
    scale.value = 3.0
    assert case.runner.stale.find() is not None


def test_sizes_between_are_rehearsed_once_where_the_ends_are_compared() -> None:
    case = Case(guard="off", guarded="ends", facts="off")
    report = case.runner.capture()
    assert not report.failures
    warmed = {rows: case.runs[Stage.WARMING, rows] for rows in SIZES}
    # Free run of the body, of the pieces (whose kernels are tuned then), rehearsal, and the body to compare with.
    assert warmed == {8: 4, 4: 1, 2: 1, 1: 3}


def test_all_sizes_are_compared_unless_the_ends_are_asked_for() -> None:
    case = Case(guard="off", facts="off")
    assert not case.runner.capture().failures
    assert {rows: case.runs[Stage.WARMING, rows] for rows in SIZES} == {8: 4, 4: 2, 2: 2, 1: 3}


def test_what_one_end_shows_holds_for_the_sizes_of_its_program() -> None:
    """At 8 rows, trace and body agree."""

    def factor(rows: int) -> float:
        return 1.0 + (rows - 8) if torch.compiler.is_compiling() else 1.0

    report = Case(factor=factor, guard="off", guarded="ends", facts="off").runner.capture()
    assert {row.key.size for row in report.failures} == set(SIZES)
    for row in report.failures:
        assert "the traced body gives another result than the body itself" in str(row.error)
        assert str(row.key) in str(row.error)


def test_programs_have_ends_of_their_own() -> None:
    """Sizes above 2 are a program: what is wrong at 4 and not at 8 shows at its smaller end."""

    def factor(rows: int) -> float:
        if rows > 2:
            return 1.0 + (rows - 8) if torch.compiler.is_compiling() else 1.0
        return 3.0

    report = Case(factor=factor, guard="off", guarded="ends", facts="off").runner.capture()
    assert {row.key.size for row in report.failures} == {4, 8}


@pytest.mark.parametrize("failing", [8, 1])
def test_where_an_end_can_not_be_compared_the_next_size_is(failing: int) -> None:
    """At 8 rows and at 1, trace and body agree."""

    def factor(rows: int) -> float:
        return 1.0 + (rows - 8) * (rows - 1) if torch.compiler.is_compiling() else 1.0

    case = Case(factor=factor, guard="off", guarded="ends", facts="off")
    case.failing = failing
    errors = {row.key.size: str(row.error) for row in case.runner.capture().failures}
    assert errors.keys() == set(SIZES)
    assert "no room" in errors.pop(failing)
    assert all("another result than the body itself" in error for error in errors.values())


def test_where_an_end_fails_the_others_serve() -> None:
    for failing in (8, 1):
        case = Case(guard="off", guarded="ends", facts="off")
        case.failing = failing
        assert [row.key.size for row in case.runner.capture().failures] == [failing]


@pytest.mark.parametrize("at", ["trace", "pieces"])
def test_facts_are_found_where_the_largest_size_has_no_recording(at: str) -> None:
    """Its body ran freely before, and is looked at no more."""

    def factor(rows: int) -> float:
        if at == "trace" and rows == 8 and torch.compiler.is_compiling():
            raise ValueError("too large")
        return 1.0

    case = Case(factor=factor, guard="off", guarded="ends", facts="verify")
    case.failing = 8 if at == "pieces" else None
    assert [row.key.size for row in case.runner.capture().failures] == [8]
    assert case.runner.stale.find() is None
    case.weight = torch.zeros(4)
    assert case.runner.stale.find() is not None


def test_a_later_capture_is_compared_anew() -> None:
    is_wrong = False
    case = Case(factor=lambda rows: 2.0 if is_wrong and torch.compiler.is_compiling() else 1.0, guarded="ends")
    assert not case.runner.capture().failures
    is_wrong = True
    assert len(case.runner.capture().failures) == len(SIZES)
    assert not case.runner.captured
    is_wrong = False
    assert not case.runner.capture().failures


def rounding(module: fx.GraphModule) -> Callable[..., Any]:
    """A compiler that rounds in its own way."""
    return lambda *args: tuple(one * 1.003 for one in module.forward(*args))


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setitem(COMPILERS, "rounding", rounding)
    case = Case(guard="off", guarded="ends", facts="off", tc_compiler="rounding")
    assert not case.runner.capture().failures
    assert not case.runner.backend.is_exact
    case.runs.clear()
    return case


def test_a_quick_look_runs_what_was_recorded_and_measures_no_rounding(rounded: Case) -> None:
    found = verify_some(rounded.runner, seconds=0.0)
    assert [check.passed for check in found.checks if check.name == "same view"] == [True]
    assert rounded.runs[Stage.EAGER, 8] == 1
    between = verify_some(rounded.runner, seconds=60.0)
    assert [check.key.size for check in between.checks if check.name == "same view"] == [8, 2]


def test_a_replay_that_differs_from_what_was_recorded_is_compared_with_the_body(rounded: Case) -> None:
    (largest,) = (key for key in rounded.runner.captured if key.size == 8)
    with rounded.runner.recording(largest).replaying(lambda steps: None):
        found = verify_some(rounded.runner, seconds=0.0)
    (check,) = (check for check in found.checks if check.name == "same view")
    assert not check.passed
    assert rounded.runs[Stage.EAGER, 8] > 2


def test_memory_that_compiled_code_has_for_itself_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers take it from the allocator, past the ops, and compute into it by ops."""
    scratch = torch.zeros(64)

    def with_scratch(module: fx.GraphModule) -> Callable[..., Any]:
        def run(*args: Any) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = module.forward(*args)
            torch.add(found[0].flatten()[:4], 1, out=scratch[:4])
            return found

        return run

    monkeypatch.setitem(COMPILERS, "inductor", with_scratch)
    device, state = EmulatedDevice(), torch.zeros(4)
    device.capabilities = replace(device.capabilities, compilers=frozenset(COMPILERS))

    def body(x: torch.Tensor) -> torch.Tensor:
        state.add_(x[0])
        return x * 2

    slots = [Slot("x", ("seqs", 4), torch.float32)]
    compiled: dict[str, Any] = {"backend": "tc_piecewise", "tc_compiler": "inductor"}
    run = graphed(body, slots=slots, bucketed="seqs", buckets=[2, 4], device=device, **compiled)
    assert not run.capture().failures
    assert not state.any(), "what the body writes is put back"
    torch.testing.assert_close(run(x=torch.ones(4, 4)), torch.full((4, 4), 2.0))
    assert state.eq(1).all()


def reads_in_warm_ups(module: fx.GraphModule) -> Callable[..., Any]:
    """A compiler whose code does at 4 rows what a rehearsal refuses, and a capture does not show."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = module.forward(*args)
        if current().stage is Stage.WARMING and len(found[0]) == 4:
            found[0].sum().item()
        return found

    return run


def test_what_rehearsals_of_pieces_refuse_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the ends, and where a run of the body itself shows nothing."""
    monkeypatch.setitem(COMPILERS, "reading", reads_in_warm_ups)
    case = Case(guard="off", guarded="ends", facts="off", tc_compiler="reading")
    (row,) = case.runner.capture().failures
    assert row.key.size == 4
    assert "reads the device from the host" in str(row.error)


def tokens_off(module: fx.GraphModule) -> Callable[..., Any]:
    """A compiler whose code has wrong integers for up to two rows."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        found = module.forward(*args)
        return tuple(3 - one if one.dtype == torch.int64 and len(one) <= 2 else one for one in found)

    return run


def test_of_every_program_one_recording_is_compared_with_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, which rounding may flip, are not compared at capture; and the code that was recorded has the same."""
    monkeypatch.setitem(COMPILERS, "tokens off", tokens_off)
    options: dict[str, Any] = {"guard": "off", "guarded": "ends", "facts": "off", "tc_compiler": "tokens off"}
    case = Case(factor=lambda rows: 3.0 if rows <= 2 else 1.0, tail=lambda x: x.argmax(-1), **options)
    assert not case.runner.capture().failures
    found = verify_some(case.runner, seconds=0.0)
    failed = [check for check in found.checks if not check.passed]
    assert [(check.key.size, check.name) for check in failed] == [(1, "unpadded")]


def second_layer_off(module: fx.GraphModule) -> Callable[..., Any]:
    """A compiler that fails where the first layer ends and the second begins: keys of the first are right."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        found = module.forward(*args)
        is_last = any(one.shape[-1] == SHAPES["tiny"].vocab for one in found)
        return tuple(one * 2 for one in found) if "silu" in module.code and not is_last else found

    return run


@pytest.mark.slow
def test_a_fault_of_one_layer_is_found_in_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPILERS, "inductor", second_layer_off)
    device = EmulatedDevice()
    device.capabilities = replace(device.capabilities, compilers=frozenset(COMPILERS))
    options = EngineOptions(max_seqs=4, max_tokens=32, max_len=96, page_size=8, dtype=torch.float32, verify="off")
    asked = [ask(f"{phase}.backend", "tc_piecewise", origin="test") for phase in ("decode", "prefill")]
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=options, asked=asked)
    assert SHAPES["tiny"].num_layers == 2
    rows = [row for report in llm.reports for row in report.rows if row.key.phase in ("decode", "prefill")]
    assert len(rows) > 2
    assert all("the traced body gives another result" in str(row.error) for row in rows)
