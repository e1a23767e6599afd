"""tc_piecewise: torch.compile once for all buckets, cut at the breaks; outputs as eager, nothing baked by a size."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_child
from phonograph import (
    Buckets,
    CaptureError,
    CoverageError,
    DeclarationError,
    Dim,
    Extent,
    Graphed,
    Pad,
    Phase,
    PhasePlan,
    PlanError,
    Replay,
    Runner,
    Slot,
    Stage,
    break_graph,
    current,
    graph_break,
    graphed,
    opaque,
)
from phonograph.devices import EmulatedDevice, capturing, cuda
from phonograph.devices.capturing import said_to_capture
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.planning.rules import DeviceFacts
from phonograph.graphs.planning.settings import KNOWN_PHASES, Level, Measured, ask
from phonograph.graphs.progress import silent
from phonograph.graphs.recording.backends import BACKENDS, BackendOptions
from phonograph.graphs.recording.backends.base import BodyView
from phonograph.graphs.recording.backends.compilers import computation_of
from phonograph.graphs.recording.backends.tc_piecewise import MAX_PROGRAMS, TcPiecewiseBackend
from phonograph.graphs.recording.compilations import refusing_compilations
from phonograph.graphs.running.runner_options import facts_of
from phonograph.settings import environment, use_compile_cache

SLOTS = [Slot("x", ("seqs", 4), torch.float32)]
SIZES = (1, 2, 4, 8)
ROWS = (1, 2, 3, 5, 8)


def like(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(q)


def pieced(function: Callable[..., Any], **kwargs: Any) -> Graphed:
    given: dict[str, Any] = {
        "slots": SLOTS,
        "bucketed": "seqs",
        "buckets": Buckets.of(*SIZES),
        "backend": "tc_piecewise",
    }
    return graphed(function, **given | {"device": EmulatedDevice(poison=True)} | kwargs)


def backend_of(run: Graphed) -> TcPiecewiseBackend:
    assert isinstance(run.runner.backend, TcPiecewiseBackend)
    return run.runner.backend


def check_all(run: Graphed, function: Callable[..., Any], rows: tuple[int, ...] = ROWS) -> None:
    for num in rows:
        x = torch.randn(num, 4)
        found, wanted = run(x=x), function(x)
        assert isinstance(run.runner.last, Replay)
        torch.testing.assert_close(found, wanted)


@graph_break(fake=like)
def scaled_by_sum(q: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return q * (1.0 + float(q[0].sum()) * 0.0) * scale


class Layers(torch.nn.Module):
    """Two layers with a marked function, a marked method and a bare break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.seen: list[str] = []

    @graph_break(fake=lambda q, width: (torch.empty_like(q), q.new_empty(q.shape[0], width)))
    def attend(self, q: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.tolist() is not None  # what no graph can hold
        return q * 2, q[:, :width] + 1

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = torch.relu(self.first(x))
        h = scaled_by_sum(h, scale=3.0)
        a, b = self.attend(h, 2)
        break_graph()
        return {"y": self.second(a), "parts": (b, h)}


def test_outputs_equal_eager_in_every_bucket_after_one_compilation() -> None:
    model = Layers().eval()
    run = pieced(model)
    report = run.capture(verify=True)
    assert not report.failures
    assert {row.num_graphs for row in report.rows} == {4}
    assert backend_of(run).num_programs == 1
    check_all(run, model)
    assert "compiled by eager" in run.explain()
    assert "1 programs of 2 pieces, cut at 3 breaks" in run.explain()


def test_layers_that_compute_the_same_are_compiled_once() -> None:
    weights = [torch.randn(4, 4) for _ in range(5)]
    scales = [1.0, 1.0, 2.0, 1.0, 1.0]

    def body(x: torch.Tensor) -> torch.Tensor:
        for weight, scale in zip(weights, scales, strict=True):
            x = scaled_by_sum(torch.tanh(x @ weight) * scale + x)
        return x

    run = pieced(body)
    assert not run.capture(verify=True).failures
    check_all(run, body)
    assert "1 programs of 5 pieces, cut at 5 breaks; 2 pieces differ" in run.explain()


def test_a_piece_is_told_from_others_by_all_that_a_compiler_builds_upon() -> None:
    def computed(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        found: list[Any] = []

        def backend(module: Any, examples: Any) -> Any:
            for node, value in zip(module.graph.nodes, examples, strict=False):
                node.meta["example_value"] = value
            found.append(computation_of(module))
            return module.forward

        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
        return found[0]

    x, y = torch.ones(4, 4), torch.ones(4, 4)
    assert computed(lambda a, b: a @ b, x, y) == computed(lambda c, d: c @ d, y, x)
    different = [
        computed(lambda a, b: a @ b, x, y),
        computed(lambda a, b: a + b, x, y),
        computed(lambda a, b: a @ b * 2, x, y),
        computed(lambda a, b: a @ b * 2.0, x, y),
        computed(lambda a, b: a @ b, x.double(), y.double()),
        computed(lambda a, b: a @ b, x, y.t().contiguous().t()),
        computed(lambda a, b: a @ b, torch.ones(2, 4), y),
        computed(lambda a, b: a @ b, x, torch.ones(5, 4)[1:]),
        computed(lambda a, b: a @ b.view(4, 4), x, x[:]),
    ]
    assert len(set(different)) == len(different)


def test_progress_is_told_while_parts_are_compiled() -> None:
    told: list[tuple[str, int, int]] = []
    run = pieced(Layers().eval())
    run.capture(lambda *now: told.append(now))
    phase = run.runner.phase.name
    doing = [name for name, _, _ in told]
    assert [one for one in told if one[0] == f"compiling {phase}: parts"][-1][1:] == (7, 7)
    assert [name for name in doing if name.startswith(f"compiling {phase}[")] == [
        f"compiling {phase}[seqs={size}]" for size in reversed(SIZES)
    ]
    last = max(index for index, name in enumerate(doing) if name.startswith("compiling"))
    assert last < min(index for index, name in enumerate(doing) if name.startswith("capturing"))
    assert last < min(index for index, name in enumerate(doing) if name.startswith("warming"))


def num_compilations() -> int:
    """How many graphs Dynamo has made in this process, by its own count."""
    return int(importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"])


class EnteredError(Exception):
    """Somebody called what torch.compile returned."""


def refuse_calls(run: Graphed) -> None:
    """From now on, compiled functions, whose guards are evaluated at every call, raise."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EnteredError

    tracers = [tracer for group in backend_of(run)._programs.values() for tracer in group.tracers]
    assert tracers
    for tracer in tracers:
        assert callable(tracer._function)
        tracer._function = refuse


def test_replays_enter_neither_the_body_nor_what_torch_compile_returned(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def body(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            with calls.open("a") as file:
                file.write("x")
        return scaled_by_sum(x + 1) * 2

    begun = num_compilations()
    run = pieced(body)
    assert not run.capture().failures
    before, compiled = calls.read_text(), num_compilations()
    assert before
    assert compiled == begun + 1
    refuse_calls(run)
    check_all(run, lambda x: (x + 1) * 2)
    assert calls.read_text() == before
    assert num_compilations() == compiled
    # What a call would look like: a shape is bound to its program by one.
    backend = backend_of(run)
    (group,) = backend._programs.values()
    with pytest.raises(CaptureError, match="EnteredError"):
        group.tracers[0].call(BodyView(ShapeKey("body", "seqs", 2), {"x": torch.zeros(2, 4)}, {}, []))


def test_one_compilation_for_all_buckets_by_the_count_of_dynamo() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return scaled_by_sum(x * 2 if x.shape[0] > 3 else x + 10) * 3

    for body, wanted in ((Layers().eval(), 1), (branches, 2)):
        begun = num_compilations()
        run = pieced(body, buckets=Buckets.of(*SIZES, exact=True))
        assert not run.capture().failures
        assert len(run.runner.captured) == len(SIZES)
        assert (num_compilations() - begun, backend_of(run).num_programs) == (wanted, wanted)


def test_a_branch_on_the_number_of_rows_is_found_and_never_baked() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 3:
            return x * 2
        return x + 10

    run = pieced(body, buckets=Buckets.of(*SIZES, exact=True))
    assert not run.capture(verify=True).failures
    assert backend_of(run).num_programs == 2
    check_all(run, body, SIZES)
    assert re.search(r"a program of its own for body\[seqs=2\]: the number of seqs > 3 is not so", run.explain())


def test_one_row_is_a_size_like_any_other() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, keepdim=True) + x if x.shape[0] == 1 else x * 2

    run = pieced(body, buckets=Buckets.of(1, 4, exact=True))
    run.capture(verify=True)
    check_all(run, body, (1, 4))
    general, single = (program.graph for program in backend_of(run).programs)
    x = torch.ones(1, 4)
    assert general.sizes([4, torch.ones(4, 4)])
    assert not single.sizes([x]), "inductor can't compile code that is general in a size from a size of one"
    assert single.misfit([x]) == ""
    assert single.misfit([x.repeat(2, 1)])


def test_too_many_programs_are_refused_with_the_line() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * int(x.shape[0])  # a number for every size

    def branches(x: torch.Tensor) -> torch.Tensor:
        for size in range(1, 9):
            if x.shape[0] == size:
                return x + size
        return x

    run = pieced(branches, buckets=Buckets.of(*range(1, 9), exact=True))
    report = run.capture()
    assert len(report.failures) == 8 - MAX_PROGRAMS
    for row in report.failures:
        assert "none is for this one: the number of seqs == 8 is not so" in str(row.error)
        assert "if x.shape[0] == size" in str(row.error)
    shaped = pieced(body, buckets=Buckets.of(*SIZES, exact=True))
    assert not shaped.capture(verify=True).failures
    assert backend_of(shaped).num_programs == 1


def test_an_accidental_break_names_the_line() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # the line
        return x * 2

    run = pieced(body, guard="off")
    error = run.capture().failures[0].error
    assert error is not None
    assert error.frame is not None
    assert error.frame.function == "body"
    assert error.frame.line == body.__code__.co_firstlineno + 1
    assert "torch.compile can't trace this" in str(error)
    assert "@graph_break(fake=…)" in str(error)


def test_a_break_without_fake_says_what_to_write() -> None:
    @graph_break
    def hidden(q: torch.Tensor) -> torch.Tensor:
        return q * 2

    run = pieced(lambda x: hidden(x) + 1)
    error = run.capture().failures[0].error
    assert error is not None
    assert "does not look into" in str(error)
    assert "fake=" in str(error)
    assert "hidden" in str(error)
    with pytest.raises(CoverageError):
        pieced(lambda x: hidden(x) + 1, strict=True).capture()


def test_a_fake_that_is_wrong_is_found() -> None:
    @graph_break(fake=lambda q: q.new_empty(q.shape[0], 3))
    def hidden(q: torch.Tensor) -> torch.Tensor:
        return q * 2

    error = pieced(lambda x: hidden(x) + 0).capture().failures[0].error
    assert "its fake= says torch.float32[8, 3]" in str(error)


WRONG_FAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "too many": (lambda q: (like(q), like(q), like(q)), "a tuple of 3"),
    "too few": (lambda q: (like(q),), "a tuple of 1"),
    "no tuple": (like, "its fake= says torch.float32[8, 4]"),
    "a list": (lambda q: [like(q), like(q)], "a list of 2"),
    "another number": (lambda q: (like(q), 3), "(torch.float32[8, 4], 3)"),
}


@pytest.mark.parametrize("wrong", WRONG_FAKES)
def test_a_fake_says_all_that_a_break_returns(wrong: str) -> None:
    fake, said = WRONG_FAKES[wrong]

    @graph_break(fake=fake)
    def hidden(q: torch.Tensor) -> Any:
        return q * 2, 5 if wrong == "another number" else q * 3

    def body(x: torch.Tensor) -> torch.Tensor:
        found = hidden(x * 2)
        return found[0] + found[-1] * len(found)

    report = pieced(body).capture()
    assert len(report.failures) == len(SIZES)
    error = str(report.failures[0].error)
    assert "hidden returned a tuple of 2" in error
    assert said in error
    assert error.endswith("Correct fake=")


def test_a_trace_that_takes_another_branch_is_refused() -> None:
    """Whichever way the body asks; also where only its state shows it."""
    written = torch.zeros(4)

    def asks_torch(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.compiler.is_compiling() else 1)

    def asks_us(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if current().stage is Stage.COMPILING else 1)

    def tells_a_text(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x * 2, "traced" if torch.compiler.is_compiling() else "written"

    def writes(x: torch.Tensor) -> torch.Tensor:
        written.copy_(x.sum(0) * (2 if torch.compiler.is_compiling() else 1))
        return x * 2

    for body in (asks_torch, asks_us, tells_a_text, writes):
        report = pieced(body).capture()
        assert len(report.failures) == len(SIZES)
        assert "the traced body gives another result than the body itself" in str(report.failures[0].error)
    assert not written.any()
    same = pieced(lambda x: x * 2 if torch.compiler.is_compiling() else x + x)
    assert not same.capture(verify=True).failures


def test_a_body_that_differs_from_itself_is_not_judged() -> None:
    @graph_break(fake=like)
    def ticking(q: torch.Tensor) -> torch.Tensor:
        return q + time.perf_counter_ns() % 1009  # no two runs are alike, however fast they are

    assert not pieced(lambda x: ticking(x * 2) + 1).capture().failures


def test_an_argument_that_no_graph_holds_is_refused() -> None:
    class Config:
        scale = 2.0

    config = Config()

    @graph_break(fake=like)
    def hidden(q: torch.Tensor, config: Config) -> torch.Tensor:
        return q * config.scale

    error = pieced(lambda x: hidden(x, config) + 1).capture().failures[0].error
    assert error is not None
    assert "a Config is passed to a break, and no traced graph holds it" in str(error)
    assert "by self" in str(error)


def test_a_body_that_cannot_be_traced_falls_back_only_where_the_plan_allows_it() -> None:
    @graph_break
    def hidden(q: torch.Tensor) -> torch.Tensor:
        return q * float(q.shape[0] > 0)

    def body(x: torch.Tensor) -> torch.Tensor:
        return hidden(x) + 1

    assert len(pieced(body).capture().failures) == len(SIZES)
    run = pieced(body, tc_fallback=True)
    assert not run.capture(verify=True).failures
    check_all(run, body)
    assert "is recorded as breakable does" in run.explain()
    assert "fake=" in run.explain()


def test_breaks_by_the_name_of_an_op() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.relu(x), 1).softmax(-1) + 1

    run = pieced(body, break_ops=["cumsum", "softmax"])
    report = run.capture(verify=True)
    assert {row.num_graphs for row in report.rows} == {3}
    check_all(run, body)
    wrong = pieced(body, break_ops=["cumsumm"]).capture().failures[0].error
    assert "no op 'cumsumm'" in str(wrong)
    assert "cumsum" in str(wrong)


def test_a_host_read_is_refused_as_by_the_other_backends() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item()  # the line
        return x * total

    error = pieced(body, guard="off").capture().failures[0].error
    assert error is not None
    assert error.frame is not None
    assert error.frame.line == body.__code__.co_firstlineno + 1


def test_current_and_torch_tell_compiling_from_capturing(tmp_path: Path) -> None:
    seen = tmp_path / "seen"  # Python values that trial runs change are put back

    @graph_break(fake=like)
    def gap(q: torch.Tensor) -> torch.Tensor:
        with seen.open("a") as file:
            file.write(f"{current().stage.value} {torch.compiler.is_compiling()}\n")
        return q + 0

    def body(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            assert current().stage is Stage.COMPILING
            assert current().backend == "tc_piecewise"
            assert current().phase == "body"
            return gap(x) + 1
        assert current().stage is not Stage.COMPILING
        return gap(x) + 1

    run = pieced(body, facts="off", buckets=Buckets.of(2, 4))
    assert not run.capture().failures
    assert run.explain().count("stays eager") == 0
    run(x=torch.zeros(2, 4))
    run(x=torch.zeros(9, 4))
    stages = {*seen.read_text().splitlines()}
    assert stages == {"warming False", "capturing False", "replaying False", "eager False"}


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_compiling_and_capturing_are_two_questions_with_right_answers_in_every_stage(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of our own `current()` and of torch: (stage, is a trace looking, is a capture going on)."""
    monkeypatch.setattr(capturing, "_ask_driver", lambda: False)  # a CPU has no driver that knows
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    seen = tmp_path / "seen"  # Python values that trial runs change are put back

    def note(where: str) -> None:
        answers = torch.compiler.is_compiling(), torch.cuda.is_current_stream_capturing()
        with seen.open("a") as file:
            file.write(f"{where} {current().stage.value} {answers[0]} {answers[1]}\n")

    def recorded(q: torch.Tensor) -> torch.Tensor:
        note("recorded")
        return q + 0

    @graph_break(fake=like)
    def gap(q: torch.Tensor) -> torch.Tensor:
        note("gap")
        return q + 0

    kernel = opaque(recorded, fake=like)

    def body(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            assert current().stage is Stage.COMPILING
            assert not torch.cuda.is_current_stream_capturing()
        return gap(kernel(x)) if backend != "full" else kernel(x)

    run = pieced(body, facts="off", guard="off", buckets=Buckets.of(2, 4), backend=backend)
    assert not run.capture().failures
    run(x=torch.zeros(2, 4))
    run(x=torch.zeros(9, 4))
    assert run.stats.replays.total() == 1
    found = set(seen.read_text().splitlines())
    wanted = {
        "recorded warming False False",  # a free run
        "recorded warming False True",  # a rehearsal runs what a capture will
        "recorded capturing False True",
        "recorded eager False False",
    }
    gaps = {f"gap {stage} False False" for stage in ("warming", "capturing", "replaying", "eager")}
    assert found == wanted | (gaps if backend != "full" else set())


def test_a_compiled_body_is_recorded_by_every_backend() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend="eager")

    def body(x: torch.Tensor) -> torch.Tensor:
        return scaled_by_sum(compiled(x)) + 1 if broken else compiled(x) + 1

    for backend in ("full", "breakable", "tc_piecewise"):
        broken = backend != "full"
        run = pieced(body, backend=backend)
        assert not run.capture(verify=True).failures
        check_all(run, body)


def test_compilers_may_put_the_random_numbers_back_where_others_may_not_set_them() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend="eager")
    with said_to_capture():
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(CaptureError, match="sets the random numbers"):
            torch.set_rng_state(torch.get_rng_state())


def test_a_capture_refuses_to_compile() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend="eager", dynamic=False)
    compiled(torch.zeros(2))
    with refusing_compilations():
        compiled(torch.ones(2))
    said = r"in the middle of a capture \(test_piecewise.py:\d+, in .*dynamic=True"
    with pytest.raises(CaptureError, match=said), refusing_compilations():
        compiled(torch.ones(3))

    def failing() -> None:
        compiled(torch.ones(4))
        raise RuntimeError("what a device says when a kernel was tuned in a capture")

    with pytest.raises(CaptureError, match="in the middle of a capture"), refusing_compilations():
        failing()
    with pytest.raises(ZeroDivisionError), refusing_compilations():
        raise ZeroDivisionError
    with refusing_compilations():
        torch._dynamo.reset()
    compiled(torch.ones(5))


def test_a_compiler_may_wait_for_the_device_in_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor makes tensors on the device at its first compilation, and waits for their copies."""
    modes, seen = [0], list[int]()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: modes.append(2 if mode == "error" else mode))

    def compiler(graph: Any, inputs: Any) -> Any:
        seen.append(modes[-1])
        return graph.forward

    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend=compiler, dynamic=False)
    with cuda._waits_refused():
        assert modes[-1] == 2
        compiled(torch.ones(2))
        assert modes[-1] == 2
        assert seen == [0]
        with pytest.raises(Exception, match="refused"):
            torch.compile(lambda x: x + 1, backend=_refuse, dynamic=False)(torch.ones(3))
        assert modes[-1] == 2
        thread = threading.Thread(target=lambda: compiled(torch.ones(4)))
        thread.start()
        thread.join()
        assert modes[-1] == 2, "the mode is the process's, whoever compiles"
    assert modes[-1] == 0
    assert seen == [0, 0]


def _refuse(graph: Any, inputs: Any) -> Any:
    raise ValueError("refused")


def test_grad_is_off_whatever_the_body_says() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))

    @graph_break(fake=like)
    def gap(q: torch.Tensor) -> torch.Tensor:
        if current().stage in (Stage.CAPTURING, Stage.REPLAYING):
            assert not q.requires_grad
        return q * 1

    @torch.enable_grad()
    def body(x: torch.Tensor) -> torch.Tensor:
        return gap(x @ weight) + 1

    run = pieced(body)
    with torch.enable_grad():
        run.capture()
        found = run(x=torch.ones(3, 4))
    assert not found.requires_grad
    torch.testing.assert_close(found, torch.ones(3, 4) @ weight.detach() + 1)


@dataclass(frozen=True)
class Answer:
    first: torch.Tensor
    rest: list[torch.Tensor]
    name: str


def test_outputs_of_any_structure_are_rebuilt() -> None:
    constant = torch.arange(4.0)

    def body(x: torch.Tensor) -> Answer:
        y = scaled_by_sum(x) * 2
        return Answer(y, [y, y + constant], "two")

    run = pieced(body)
    run.capture(verify=True)
    x = torch.randn(3, 4)
    found, wanted = run(x=x), body(x)
    assert found.name == "two"
    assert found.rest[0] is found.first
    torch.testing.assert_close(found.rest[1], wanted.rest[1])


def test_state_that_gaps_and_pieces_write_is_that_of_eager() -> None:
    def made() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        cache = torch.zeros(9, 4)

        @graph_break(fake=lambda cache, rows, k: None, mutates=("cache",))
        def write(cache: torch.Tensor, rows: torch.Tensor, k: torch.Tensor) -> None:
            cache[rows] = k

        def body(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            write(cache, rows, x * 2)
            return cache[rows] + x

        return body, cache

    slots = [*SLOTS, Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, 8))]
    (body, cache), (eager, expected) = made(), made()
    run = pieced(body, slots=slots)
    assert not run.capture().failures
    assert cache.eq(0).all()
    for num in (1, 3, 8):
        x, rows = torch.randn(num, 4), torch.randperm(8)[:num] + 1
        torch.testing.assert_close(run(x=x, rows=rows), eager(x, rows))
        torch.testing.assert_close(cache[1:], expected[1:])


def test_an_opaque_call_is_recorded_and_not_traced() -> None:
    def normed(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        assert not torch.compiler.is_compiling()
        return q / q.norm(dim=-1, keepdim=True), q.sum(-1) * scale

    kernel = opaque(normed, fake=lambda q, scale: (torch.empty_like(q), q.new_empty(q.shape[0])))

    def body(x: torch.Tensor) -> torch.Tensor:
        unit, total = kernel(x + 1, 2.0)
        return unit * total[:, None] + x

    run = pieced(body)
    report = run.capture(verify=True)
    assert {row.num_graphs for row in report.rows} == {1}
    check_all(run, body)
    assert "2 pieces, cut at 0 breaks" in run.explain()
    for backend in ("full", "breakable", "disabled"):
        other = pieced(body, backend=backend)
        other.capture()
        torch.testing.assert_close(other(x=torch.ones(2, 4)), body(torch.ones(2, 4)))


def test_an_opaque_call_with_a_wrong_fake_is_found() -> None:
    kernel = opaque(lambda q: q * 2, fake=lambda q: q.new_empty(q.shape, dtype=torch.float64))
    error = pieced(lambda x: kernel(x) + 1).capture().failures[0].error
    assert "opaque call" in str(error)
    assert "its fake= says torch.float64[8, 4]" in str(error)


def test_mutates_names_arguments() -> None:
    with pytest.raises(DeclarationError, match="no argument"):
        graph_break(fake=like, mutates=("kv",))(lambda q, cache: q)


def test_another_value_of_what_is_no_slot_runs_eagerly() -> None:
    def body(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return scaled_by_sum(x) * scale

    run = pieced(body)
    run.capture()
    x = torch.randn(2, 4)
    torch.testing.assert_close(run(x=x, scale=5.0), body(x, 5.0))
    assert not isinstance(run.runner.last, Replay)


def test_a_changed_weight_is_seen_by_the_facts() -> None:
    model = Layers().eval()
    run = pieced(model)
    run.capture()
    model.first = torch.nn.Linear(4, 8)
    x = torch.randn(2, 4)
    torch.testing.assert_close(run(x=x)["y"], model(x)["y"])
    assert "stale" in run.explain()
    run.refresh()
    check_all(run, model)


def test_two_dims_that_vary_and_meet_in_size() -> None:
    slots = [Slot("x", ("seqs", 4), torch.float32), Slot("pages", ("pages", 4), torch.float32)]

    def body(x: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return x + pages.reshape(x.shape[0], -1, 4).sum(1)

    run = pieced(body, slots=slots, dims=[Dim("pages", per="seqs", times=2)])
    assert not run.capture(verify=True).failures
    assert backend_of(run).num_programs == 1
    x, pages = torch.randn(3, 4), torch.randn(6, 4)
    torch.testing.assert_close(run(x=x, pages=pages), body(x, pages))


@dataclass
class Numbered:
    x: torch.Tensor
    num_rows: int


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_size_that_the_batch_carries_as_a_number_is_one_program(as_dict: bool) -> None:
    def body(batch: Any) -> torch.Tensor:
        x, num = (batch["x"], batch["num_rows"]) if as_dict else (batch.x, batch.num_rows)
        return scaled_by_sum(x.view(num, 2, 2).transpose(1, 2).reshape(num, 4)) + 1

    def sample(extent: Extent, seed: int) -> Any:
        num = extent.used["seqs"]
        x = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "num_rows": num} if as_dict else Numbered(x, num)

    phase = Phase(
        name="numbered", slots=SLOTS, bucketed="seqs", body=body, sample=sample, dims=[Dim("seqs", field="num_rows")]
    )
    plan = PhasePlan(backend="tc_piecewise", buckets=(1, 2, 3, 4, 6, 8))
    runner = Runner(phase, EmulatedDevice(poison=True), plan)
    report = runner.capture(silent)
    assert not report.failures, report
    assert isinstance(runner.backend, TcPiecewiseBackend)
    assert runner.backend.num_programs == 1
    for num in (1, 3, 5, 8):
        x = torch.randn(num, 4)
        batch = {"x": x, "num_rows": num} if as_dict else Numbered(x, num)
        torch.testing.assert_close(runner.run(batch), body(batch))
        assert isinstance(runner.last, Replay)


def test_attention_of_a_library_is_broken_by_its_name() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        q = x.view(-1, 1, 2, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q + 1, q * 2).flatten(1) + x

    run = pieced(body, break_ops=["scaled_dot_product_attention"])
    assert {row.num_graphs for row in run.capture(verify=True).rows} == {2}
    check_all(run, body)


def test_rules_and_compilers() -> None:
    assert "device-lacks-compiler" in pieced(lambda x: x + 1).explain()
    with pytest.raises(PlanError, match="can't record what inductor compiles"):
        pieced(lambda x: x + 1, tc_compiler="inductor")
    with pytest.raises(PlanError, match="tc-debug"):
        pieced(lambda x: x + 1, debug=True)


def test_backends_are_made_with_a_compiler_that_the_device_has() -> None:
    device = EmulatedDevice()
    with pytest.raises(DeclarationError, match="can't record what inductor compiles"):
        TcPiecewiseBackend(device, device.new_pool(), BackendOptions("inductor"))


def test_a_compiler_that_is_disabled_is_told() -> None:
    dynamo = importlib.import_module("torch._dynamo")
    run = pieced(lambda x: x + 1)
    with dynamo.config.patch(disable=True):
        assert "torch.compile" in str(run.capture().failures[0].error)
    assert not run.capture().failures
    assert run.runner.captured


def test_a_failed_trace_leaves_nothing_behind() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    run = pieced(body, guard="off")
    run.capture()
    assert current().stage is Stage.EAGER
    x = torch.randn(2, 4)
    torch.testing.assert_close(run(x=x), body(x))
    other = pieced(lambda x: x + 1)
    assert not other.capture().failures
    with pytest.raises(CaptureError):
        raise run.runner.report.failures[0].error  # type: ignore[union-attr,misc]


PHASES = [KNOWN_PHASES["decode"], KNOWN_PHASES["prefill"]]
EVERYTHING = DeviceFacts("cuda", frozenset(BACKENDS), frozenset(BACKENDS))
PIECES = ask("prefill.backend", "tc_piecewise", origin="here", level=Level.SWITCH)


def test_inductor_is_the_default_compiler_where_the_device_takes_it() -> None:
    plan = resolve([PIECES], EVERYTHING, PHASES)
    assert plan.tc_compiler == "inductor"
    assert plan["prefill.backend"].value == "tc_piecewise"
    only_eager = dataclasses.replace(EVERYTHING, compilers=frozenset({"eager"}))
    assert "rule 'device-lacks-compiler'" in resolve([PIECES], only_eager, PHASES)["tc_compiler"].reason
    assert resolve([], only_eager, PHASES)["tc_compiler"].source == "default"
    with pytest.raises(PlanError, match="can't be ignored"):
        resolve([ask("ignore_rules", ["device-lacks-compiler"], origin="here")], only_eager, PHASES)


def test_a_device_without_any_compiler_is_refused_by_rule() -> None:
    none = dataclasses.replace(EVERYTHING, compilers=frozenset[str]())
    says = r"'device-lacks-compiler'.*the device cuda can't record what any compiler makes"
    with pytest.raises(PlanError, match=says):
        resolve([PIECES], none, PHASES)
    with pytest.raises(PlanError, match="can't be ignored"):
        resolve([PIECES, ask("ignore_rules", ["device-lacks-compiler"], origin="here")], none, PHASES)
    everywhere = [Measured(f"{phase.name}.backend", "tc_piecewise", "it is fastest") for phase in PHASES]
    plan = resolve([], none, PHASES, measured=everywhere)
    assert {plan[f"{phase.name}.backend"].value for phase in PHASES} == {"breakable"}
    assert "rule 'device-lacks-compiler'" in plan["prefill.backend"].reason
    assert resolve([], none, PHASES)["prefill.backend"].source == "default"

    class WithoutCompilers(EmulatedDevice):
        capabilities = dataclasses.replace(EmulatedDevice().capabilities, compilers=frozenset[str]())

    with pytest.raises(PlanError, match="device-lacks-compiler"):
        pieced(lambda x: x + 1, device=WithoutCompilers())


@pytest.mark.parametrize(
    ("rule", "field", "why"),
    [
        ("tc-untraceable", "untraceable", "it is a script"),
        ("tc-architecture", "known_failure", "its router reads from the host"),
        ("tc-packed-weights", "packed_weights", "the C\\+\\+ kernels"),
    ],
)
def test_what_is_known_to_fail_is_not_compiled(rule: str, field: str, why: str) -> None:
    given: dict[str, Any] = {field: why.replace("\\", "")}
    facts = dataclasses.replace(EVERYTHING, **given)
    with pytest.raises(PlanError, match=f"'{rule}'.*{why}"):
        resolve([PIECES], facts, PHASES)
    past = ask("ignore_rules", [rule], origin="here")
    plan = resolve([PIECES, past], facts, PHASES)
    assert plan["prefill.backend"].value == "tc_piecewise"
    assert rule in plan.ignored
    assert any(f"rule '{rule}' is ignored" in text for text in plan.warnings)
    assert resolve([], facts, PHASES)["prefill.backend"].value == "breakable"
    everywhere = [Measured(f"{phase.name}.backend", "tc_piecewise", "it is fastest") for phase in PHASES]
    kept = resolve([], facts, PHASES, measured=everywhere)
    assert {kept[f"{phase.name}.backend"].value for phase in PHASES} == {"breakable"}


def test_a_script_is_not_compiled() -> None:
    script = torch.jit.trace(torch.nn.Linear(4, 4), torch.zeros(1, 4))
    with pytest.raises(PlanError, match=r"tc-untraceable.*TorchScript"):
        pieced(script, slots=[Slot("input", ("seqs", 4), torch.float32)])


def test_debug_compiles_nothing() -> None:
    debug = ask("debug", True, origin="there")
    plan = resolve([PIECES, debug], EVERYTHING, PHASES)
    assert plan["prefill.backend"].value == "breakable"
    assert "rule 'tc-debug'" in plan["prefill.backend"].reason


def test_deterministic_mode_takes_the_compiler_that_changes_no_op() -> None:
    facts = dataclasses.replace(EVERYTHING, deterministic=True)
    plan = resolve([PIECES], facts, PHASES)
    assert plan["tc_compiler"].value == "eager"
    assert "rule 'tc-deterministic'" in plan["tc_compiler"].reason
    assert resolve([], facts, PHASES)["tc_compiler"].source == "default"
    with pytest.raises(PlanError, match="tc-deterministic"):
        resolve([PIECES, ask("tc_compiler", "inductor", origin="here")], facts, PHASES)


def test_what_deterministic_mode_is_comes_from_torch() -> None:
    device = EmulatedDevice()
    assert not facts_of(device).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert facts_of(device).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_inner_module_of_a_larger_model() -> None:
    class Model(torch.nn.Module):
        """A causal LM or a pooling model: its outer forward reads from the host and looks at the live batch."""

        def __init__(self, *, pools: bool) -> None:
            super().__init__()
            self.embed, self.layers = torch.nn.Embedding(16, 4), Layers()
            self.head, self.pools = torch.nn.Linear(4, 16), pools

        def forward(self, ids: torch.Tensor) -> Any:
            hidden = self.layers(self.embed(ids))["y"]
            return hidden.mean(0) if self.pools else self.head(hidden).argmax(-1).tolist()

    for pools in (False, True):
        model = Model(pools=pools).eval()
        run = pieced(model.layers)
        run.capture()
        ids = torch.tensor([3, 1, 4, 1, 5])
        wanted = model(ids)
        with torch.no_grad(), run.installed():
            found = model(ids)
            assert isinstance(run.runner.last, Replay)
        torch.testing.assert_close(found, wanted)
        before = run.stats.replays.total()
        with pytest.raises(ZeroDivisionError), run.installed():
            raise ZeroDivisionError
        model(ids)
        assert run.stats.replays.total() == before


def test_a_live_argument_reaches_gaps_through_the_batch_only() -> None:
    @graph_break(fake=like)
    def shifted(q: torch.Tensor) -> torch.Tensor:
        return q + current().batch["shift"]

    @graph_break(fake=like)
    def passed(q: torch.Tensor, shift: Any) -> torch.Tensor:
        return q + shift

    def by_batch(x: torch.Tensor, shift: float) -> torch.Tensor:
        return shifted(x * 2)

    def by_argument(x: torch.Tensor, shift: float) -> torch.Tensor:
        return passed(x * 2, shift)

    def sample(extent: Any, seed: int) -> dict[str, Any]:
        return {"x": torch.randn(extent.used["seqs"], 4), "shift": 0.5}

    run = pieced(by_batch, live=["shift"], sample=sample)
    assert not run.capture().failures
    x = torch.randn(3, 4)
    for shift in (1.0, 7.0):
        torch.testing.assert_close(run(x=x, shift=shift), x * 2 + shift)
        assert isinstance(run.runner.last, Replay)
    refused = pieced(by_argument, live=["shift"], sample=sample)
    failures = refused.capture().failures
    assert len(failures) == len(SIZES)
    assert "a live argument is passed to a break, and no traced graph holds it" in str(failures[0].error)
    assert "current().batch" in str(failures[0].error)
    torch.testing.assert_close(refused(x=x, shift=3.0), x * 2 + 3.0)


def test_compiled_code_is_kept_by_version_where_the_user_names_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert use_compile_cache("2.13.0", "/tmp/torchs_own") == Path("mine")
    ours = tmp_path / "phonograph" / "compiled" / "torch-2.13.0"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert use_compile_cache("2.13.0", "/tmp/torchs_own") == ours
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(ours)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchs_own")
    assert use_compile_cache("2.13.0", "/tmp/torchs_own") == ours


@pytest.mark.slow
def test_the_next_start_compiles_nothing(tmp_path: Path) -> None:
    def started() -> dict[str, Any]:
        child = Path(compiled_child.__file__)
        variables = environment({"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"})
        variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
        done = subprocess.run([sys.executable, child], env=variables, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    cold, warm = started(), started()
    assert Path(cold["folder"]) == tmp_path / "phonograph" / "compiled" / f"torch-{torch.__version__}"
    assert (cold["num_pieces"], cold["num_compiled"]) == (4, 2)
    assert cold["misses"] >= 2
    assert cold["worst"] < 1e-5
    assert warm["misses"] == 0
    assert warm["hits"] >= 2
    assert warm["worst"] < 1e-5
