"""Capture: order, failures, progress, the table, and what it leaves alone."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from phonograph import (
    CaptureError,
    Device,
    EmulatedDevice,
    HostReadError,
    PlanError,
    Reason,
    Runner,
    RunnerOptions,
    Stage,
    current,
)
from phonograph.devices.base import DeviceGraph, MemoryPool
from phonograph.graphs.progress import bar, silent
from phonograph.graphs.recording.garbage import gc_frozen
from runners import WIDTH, equal, make_runner, rows


def test_all_shapes_are_warmed_before_any_is_captured_largest_first(device: Device) -> None:
    seen = Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        seen(current().stage, batch["x"].shape[0])
        result: torch.Tensor = batch["x"] * 2
        return result

    make_runner(body, device)
    runs = [call.args for call in seen.call_args_list]
    warm, captured = Stage.WARMING, Stage.CAPTURING
    sizes = [size for stage, size in runs if stage is warm]
    free, rehearsed, guarded = [8, 8, 4, 4, 2, 2], [8, 4, 2], [8, 8, 4, 4, 2, 2]
    assert sizes == [*free, *rehearsed, *guarded, 1]  # the last tells what the axes of outputs follow
    assert runs[16:] == [(captured, 8), (captured, 4), (captured, 2)]


class TestSeveralRunners:
    """Warmed together, recorded one after the other."""

    def runners(self, device: Device, seen: Mock, state: torch.Tensor) -> list[Runner]:
        def named(name: str) -> Runner:
            def body(batch: dict[str, Any]) -> torch.Tensor:
                seen(name, current().stage)
                state.add_(1)
                return batch["x"] + state

            return make_runner(body, device, name=name, capture=False)

        return [named("prefill"), named("decode")]

    def test_all_are_warmed_before_the_first_records(self, device: Device) -> None:
        seen = Mock()
        state, x = torch.zeros(1, device=device.torch_device), rows(device, 3)
        runners = self.runners(device, seen, state)
        with ExitStack() as stack:
            records = [stack.enter_context(runner.warmed(silent)) for runner in runners]
            assert {call.args[1] for call in seen.call_args_list} == {Stage.WARMING}
            assert not gc.isenabled()
            reports = [record() for record in records]
        assert gc.isenabled()
        captures = [call.args[0] for call in seen.call_args_list if call.args[1] is Stage.CAPTURING]
        assert captures == ["prefill"] * 3 + ["decode"] * 3
        assert [len(report.rows) for report in reports] == [3, 3]
        equal(state, torch.zeros(1))
        for count, runner in enumerate(runners, 1):
            equal(runner.run({"x": x}), x + count)
            assert runner.stats.eager == {}

    def test_what_is_raised_meanwhile_leaves_them_eager_and_the_state_as_it_was(self, device: Device) -> None:
        state, x = torch.zeros(1, device=device.torch_device), rows(device, 3)
        first, second = self.runners(device, Mock(), state)
        first.capture(silent)
        with pytest.raises(KeyboardInterrupt), first.warmed(silent), second.warmed(silent):
            raise KeyboardInterrupt
        assert gc.isenabled()
        equal(state, torch.zeros(1))
        assert first.captured == second.captured == ()
        assert first.report is None, "the table of recordings that are gone is gone too"
        equal(first.run({"x": x}), x + 1)
        assert sum(first.stats.eager.values()) == 1


def test_a_profile_of_warm_ups_and_captures_is_written_and_says_where(
    device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new" / "traces"
    options = RunnerOptions(profile=str(folder))
    runner = make_runner(lambda batch: batch["x"].softmax(-1), device, options=options, name="draft/1")
    assert sorted(file.name for file in folder.iterdir()) == ["draft_1-capture.json", "draft_1-warm-up.json"]
    for file in folder.iterdir():
        assert str(file) in caplog.text
    events = json.loads((folder / "draft_1-warm-up.json").read_text())["traceEvents"]
    assert any("softmax" in event["name"] for event in events)
    x = rows(device, 3)
    equal(runner.run({"x": x}), x.softmax(-1))
    assert runner.stats.eager == {}
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"file.*Name another folder"):
        make_runner(lambda batch: batch["x"], device, options=RunnerOptions(profile=str(tmp_path / "file")))


def test_nothing_is_captured_by_a_constructor(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        raise AssertionError("ran")

    make_runner(body, device, capture=False)


def test_a_failure_names_phase_shape_op_frame_and_remedy_and_leaves_the_others(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        x: torch.Tensor = batch["x"]
        if x.shape[0] == 4:
            return x * x.sum().item()
        return x * 2

    runner = make_runner(body, device)
    assert runner.report is not None
    assert [row.key.size for row in runner.report.failures] == [4]
    error = runner.report.failures[0].error
    assert isinstance(error, HostReadError)
    assert error.shape == "decode[seqs=4]"
    assert "aten." in error.op
    assert error.frame is not None
    assert error.frame.function == "body"
    assert error.frame.file == __file__
    text = str(error)
    assert text.startswith(
        "capturing decode[seqs=4]: aten._local_scalar_dense reads the device from the host (test_capture.py:"
    )
    assert text.endswith("Put the value in a slot, or mark the function @graph_break and use backend='breakable'")
    x = rows(device, 4)
    equal(runner.run({"x": x}), x * x.sum())
    equal(runner.run({"x": rows(device, 2)}), rows(device, 2) * 2)
    equal(runner.run({"x": rows(device, 8)}), rows(device, 8) * 2)
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 1}
    assert runner.stats.replays.total() == 2


def test_host_reads_are_found_before_capture(device: Device) -> None:
    seen = Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        seen(current().stage)
        result: torch.Tensor = batch["x"] * batch["x"].sum().item()
        return result

    make_runner(body, device)
    assert {call.args[0] for call in seen.call_args_list} == {Stage.WARMING}


class Late(EmulatedDevice):
    """As a GPU: a rehearsal raises an error without a name, and a capture goes on until it ends."""

    class Recorder:
        def begin(self) -> None: ...

        def abort(self) -> None: ...

        def end(self) -> DeviceGraph:
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def recorder(self, pool: MemoryPool) -> Iterator[Any]:
        yield self.Recorder()

    @contextmanager
    def rehearsal(self, *, named: bool = True) -> Iterator[Any]:
        if named:
            with super().rehearsal() as rehearsal:
                yield rehearsal
        else:
            yield Mock()


def test_a_host_read_that_the_body_catches_is_named_when_the_device_notices_it() -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        try:
            scale = batch["x"][0, 0].item()
        except RuntimeError:
            scale = 1.0
        return batch["x"] * scale

    runner = make_runner(body, Late(), options=RunnerOptions(guard="off"))
    assert runner.report is not None
    assert [type(row.error) for row in runner.report.failures] == [HostReadError] * 3
    assert "_local_scalar_dense" in str(runner.report.failures[0].error)
    assert "test_capture.py" in str(runner.report.failures[0].error)


def test_a_capture_that_fails_for_no_op_keeps_the_devices_error() -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, Late())
    assert runner.report is not None
    assert "previous error during capture" in str(runner.report.failures[0].error)


def test_an_ordinary_exception_names_the_line(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        if batch["x"].shape[0] == 2:
            raise ValueError("not two")
        result: torch.Tensor = batch["x"] * 2
        return result

    report = make_runner(body, device).report
    assert report is not None
    error = report.failures[0].error
    assert isinstance(error, CaptureError)
    assert "ValueError: not two" in str(error)
    assert 'raise ValueError("not two")' in error.op
    assert error.frame is not None
    assert error.frame.function == "body"


def test_a_failed_capture_leaves_the_device_usable(device: Device) -> None:
    """The body fails in capture only, after ops were recorded."""

    def body(batch: dict[str, Any]) -> torch.Tensor:
        y: torch.Tensor = batch["x"] * 2 + torch.rand(1, device=device.torch_device) * 0
        if current().stage is Stage.CAPTURING and y.shape[0] == 4:
            y.sum().item()
        return y

    runner = make_runner(body, device)
    assert runner.report is not None
    assert [row.key.size for row in runner.report.failures] == [4]
    assert torch.rand(3, device=device.torch_device).shape == (3,)
    torch.zeros(1000, device=device.torch_device)
    for count in (2, 3, 8):
        equal(runner.run({"x": rows(device, count)}), rows(device, count) * 2)


def test_a_failure_is_logged(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    make_runner(lambda batch: batch["x"].nonzero(), device, sizes=(2,))
    assert "aten.nonzero has a shape that depends on device values" in caplog.text


def test_a_number_in_the_outputs_is_refused(device: Device) -> None:
    runner = make_runner(lambda batch: (batch["x"], batch["x"].shape[0]), device, sizes=(2,))
    assert runner.report is not None
    assert "returns the number 2 at [1]" in str(runner.report.failures[0].error)


def test_grad_is_off_in_capture_whatever_the_caller_does(device: Device) -> None:
    weight = torch.ones(WIDTH, device=device.torch_device, requires_grad=True)
    seen = Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        seen(torch.is_grad_enabled())
        return batch["x"] * weight

    with torch.enable_grad():
        make_runner(body, device)
        assert torch.is_grad_enabled()
    assert {call.args for call in seen.call_args_list} == {(False,)}


def test_garbage_is_not_collected_during_capture_unless_asked(device: Device) -> None:
    seen = Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        seen(gc.isenabled())
        result: torch.Tensor = batch["x"] * 2
        return result

    assert gc.isenabled()
    make_runner(body, device)
    assert {call.args for call in seen.call_args_list} == {(False,)}
    assert gc.isenabled()
    seen.reset_mock()
    make_runner(body, device, options=RunnerOptions(collect_garbage=True))
    assert {call.args for call in seen.call_args_list} == {(True,)}


def test_gc_is_restored_as_it_was_found() -> None:
    gc.disable()
    try:
        with pytest.raises(KeyError), gc_frozen(collect=False):
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("by_caller", [True, False])
def test_what_the_caller_froze_stays_frozen_and_nothing_else(by_caller: bool) -> None:
    gc.unfreeze()
    try:
        if by_caller:
            gc.freeze()
        with gc_frozen(collect=False):
            assert gc.get_freeze_count() > 0
        assert (gc.get_freeze_count() > 0) == by_caller
    finally:
        gc.freeze()  # as conftest has it


def test_the_models_state_is_what_it_was_before_capture(device: Device) -> None:
    """Warm-ups run for real; a counter on the device must not count them."""
    steps = torch.zeros(1, device=device.torch_device)
    cache = torch.zeros(8, WIDTH, device=device.torch_device)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        steps.add_(1)
        cache[: batch["x"].shape[0]] = batch["x"]
        return batch["x"] + steps

    for backend in ("full", "breakable"):
        runner = make_runner(body, device, backend=backend)
        equal(steps, torch.zeros(1))
        assert not cache.any()
        equal(runner.run({"x": rows(device, 4)}), rows(device, 4) + 1)
        equal(steps, torch.ones(1))
        steps.zero_()
        cache.zero_()


def test_preserve_takes_the_place_of_copying_the_state(device: Device) -> None:
    entered: list[int] = []

    class Keep:
        def __init__(self, batch: dict[str, Any]) -> None:
            self.size = batch["x"].shape[0]

        def __enter__(self) -> None:
            entered.append(self.size)

        def __exit__(self, *exc: object) -> None:
            entered.append(-self.size)

    make_runner(lambda batch: batch["x"] * 2, device, sizes=(2, 4), preserve=Keep)
    warmed, guarded = [4, -4, 2, -2] * 2, [4, -4, 3, -3, 2, -2, 1, -1]
    assert entered == [*warmed, *guarded, 1, -1, *[4, -4, 2, -2]]


def test_a_barrier_keeps_ranks_together_between_warm_ups(device: Device) -> None:
    met: list[int] = []
    make_runner(lambda batch: batch["x"] * 2, device, options=RunnerOptions(barrier=lambda: met.append(1)))
    assert len(met) == 3 * (3 + 2 + 1)  # warm-ups, two runs of the guard and a capture for each of three shapes


@pytest.mark.parametrize("after", [1, 2, 4, 8])
def test_a_rank_that_fails_meets_the_others_as_often(device: Device, after: int) -> None:
    """Whichever run of the body fails: one barrier less, and the other ranks wait for ever."""
    met, runs = Mock(), Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        runs()
        if runs.call_count >= after:
            raise ZeroDivisionError
        result: torch.Tensor = batch["x"] * 2
        return result

    phases: list[dict[str, Any]] = [{}, {"preserve": lambda batch: nullcontext()}]
    for phase in phases:
        runs.reset_mock()
        met.reset_mock()
        runner = make_runner(body, device, options=RunnerOptions(barrier=met), **phase)
        assert runner.report is not None
        assert runner.report.failures
        failing = met.call_count
        met.reset_mock()
        make_runner(lambda batch: batch["x"] * 2, device, options=RunnerOptions(barrier=met), **phase)
        assert met.call_count == failing


def test_progress_counts_warm_ups_and_captures(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, device, capture=False)
    steps: list[tuple[str, int, int]] = []
    runner.capture(lambda doing, done, total: steps.append((doing, done, total)))
    assert steps[0] == ("warming decode[seqs=8]", 1, 3)
    assert steps[-1] == ("capturing decode[seqs=2]", 3, 3)
    assert len(steps) == 6


def test_the_bar_is_drawn_over_itself_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, drawn in ((Terminal(), 3), (io.StringIO(), 1)):
        show = bar(stream)
        for done in (1, 2, 3):
            show("warming", done, 3)
        assert stream.getvalue().count("warming") == drawn
        assert stream.getvalue().endswith("3/3\n")


def test_the_table_has_a_line_per_bucket_and_a_total(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, device, capture=False)
    report = runner.capture(silent)
    text = str(report)
    assert [row.key.size for row in report.rows] == [8, 4, 2]
    assert all(row.seconds > 0 for row in report.rows)
    assert "decode[seqs=8]" in text
    assert "3 of 3 captured" in text
    assert report.seconds >= report.warm_seconds > 0
