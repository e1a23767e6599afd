"""Launches through Triton itself: a trace has them by named arguments, each once, and finds what a sample froze."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from phonograph import EmulatedDevice, Extent
from phonograph.devices.launches import followers, following_launches
from phonograph.devices.op_trace import Address, OpTrace, TensorNote, TracedOp
from phonograph.engine.ops.triton.kernel import Kernel
from phonograph.errors import HostConstantError
from phonograph.graphs.recording.frozen_values import Difference, find_difference
from phonograph.graphs.trust.guard import guard
from runners import WIDTH, make_runner

ON = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton compiles, it takes no host memory
COUNT = 8


@triton.jit  # type: ignore[untyped-decorator]
def scale_rows(x_ptr, out_ptr, scale, count, size: tl.constexpr = 8):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count) * scale, mask=at < count)


def scaled(x: torch.Tensor, scale: float, grid: Any = (1,)) -> torch.Tensor:
    out = torch.empty_like(x)
    scale_rows[grid](x, out, scale, x.numel())  # the launch
    return out


def traced(body: Callable[[], Any]) -> OpTrace:
    trace = OpTrace()
    with torch.no_grad(), trace.following():
        body()
    return trace


def launches(trace: OpTrace) -> list[TracedOp]:
    return [op for op in trace.ops if op.name.startswith("kernel ")]


def difference(one: Callable[[], Any], other: Callable[[], Any]) -> Difference | None:
    return find_difference(traced(one), traced(other), dict)


X = torch.arange(COUNT, dtype=torch.float32).to(ON)


# -- what is noted ------------------------------------------------------------------------------------------------


def test_a_launch_is_noted_by_kernel_grid_and_named_arguments() -> None:
    trace = traced(lambda: scaled(X, 2.0))
    (found,) = launches(trace)
    named = dict(found.arguments)
    assert found.name == "kernel scale_rows"
    assert named.keys() == {"grid", "x_ptr", "out_ptr", "scale", "count"}
    assert (named["grid"], named["scale"], named["count"]) == ((1,), 2.0, COUNT)
    assert named["x_ptr"].memory in trace.outside
    assert named["out_ptr"].memory not in trace.outside
    source, first = inspect.getsourcelines(scaled)
    line = first + next(at for at, text in enumerate(source) if "# the launch" in text)
    assert found.frame is not None
    assert (found.frame.file, found.frame.line) == (__file__, line)


def test_a_number_that_a_launch_is_passed_is_frozen() -> None:
    found = difference(lambda: scaled(X, 2.0), lambda: scaled(X, 3.0))
    assert found is not None
    assert "kernel scale_rows(scale=) gets 2.0 with one sample and 3.0 with another" in found.problem
    assert difference(lambda: scaled(X, 2.0), lambda: scaled(X, 2.0)) is None


def test_memory_that_a_launch_reads_is_the_same_or_told() -> None:
    other = torch.ones(COUNT, device=ON)
    found = difference(lambda: scaled(X, 2.0), lambda: scaled(other, 2.0))
    assert found is not None
    assert "with one sample and" in found.problem or "another tensor in every run" in found.problem


def test_a_grid_that_is_a_function_is_asked_once_and_compared() -> None:
    asked: list[int] = []

    def grid_of(programs: int) -> Callable[[dict[str, Any]], tuple[int, ...]]:
        def grid(meta: dict[str, Any]) -> tuple[int, ...]:
            asked.append(int(meta["size"]))  # a default of the kernel
            return (programs,)

        return grid

    found = difference(lambda: scaled(X, 2.0, grid_of(1)), lambda: scaled(X, 2.0, grid_of(2)))
    assert asked == [8, 8]
    assert found is not None
    assert "(grid=) gets 1 with one sample and 2 with another" in found.problem


def test_a_gap_and_another_thread_are_not_in_the_trace() -> None:
    trace = OpTrace()
    with torch.no_grad(), trace.following():
        with trace.paused():
            scaled(X, 2.0)
        elsewhere = threading.Thread(target=lambda: scaled(X, 3.0))
        elsewhere.start()
        elsewhere.join()
    assert not launches(trace)


class Nothing(JITFunction):  # type: ignore[misc]
    """A kernel of one argument."""

    __name__ = "nothing"

    def __init__(self) -> None:
        self.arg_names = ["value"]


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> Nothing:
    """A compiled kernel whose launch does nothing."""
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: None)
    return Nothing()


def test_what_triton_wraps_is_compared_by_what_is_in_it(nothing: Nothing) -> None:
    seen: list[dict[str, Any]] = []
    wide = torch.zeros(16, 16, device=ON)
    descriptor = TensorDescriptor.from_tensor(wide, [16, 16])
    wrapped = (descriptor, triton.reinterpret(X, tl.float32), tl.constexpr(4), tl.float32, (X, tl.constexpr(2)))
    with following_launches(lambda name, grid, arguments: seen.append(dict(arguments))):
        for value in wrapped:
            nothing[(1,)](value)
    tile, other_type, constant, dtype, several = (one["value"] for one in seen)
    assert tile["base"] is wide
    assert tile["block_shape"] == [16, 16]
    assert other_type == {"base": X, "dtype": "fp32"}
    assert (constant, dtype) == (4, "fp32")
    assert several[0] is X
    assert several[1] == 2


def test_compilation_alone_is_no_launch(nothing: Nothing) -> None:
    seen: list[str] = []
    with following_launches(lambda name, grid, arguments: seen.append(name)):
        nothing.run(X, grid=(1,), warmup=True)
        assert not seen
        nothing[(1,)](X)
    assert seen == ["nothing"]


# -- each once ----------------------------------------------------------------------------------------------------


def test_our_own_launcher_passes_on_what_was_told() -> None:
    """Its first launch of a kernel goes through Triton's, and later ones don't: both are one launch."""
    own = Kernel(scale_rows)
    out = torch.empty_like(X)
    for _ in range(2):
        trace = traced(lambda: own[(1,)](X, out, 2.0, COUNT, size=8))
        (found,) = launches(trace)
        assert found.frame is not None
        assert found.frame.file == __file__


def test_candidates_that_the_autotuner_measures_are_not_in_the_trace() -> None:
    measured: list[int] = []

    def bench(call: Callable[[], None], quantiles: Any) -> list[float]:
        measured.append(1)
        torch.zeros(4, device=ON).add_(1)
        call()
        return [1.0, 1.0, 1.0]

    configs = [triton.Config({"size": size}) for size in (8, 16)]
    tuned = triton.autotune(configs, key=["count"], do_bench=bench)(scale_rows)
    out = torch.empty_like(X)
    first, again = (traced(lambda: tuned[(1,)](X, out, 2.0, COUNT)) for _ in range(2))
    assert len(measured) == 2
    assert [len(launches(trace)) for trace in (first, again)] == [1, 1]
    assert find_difference(first, again, dict) is None


def test_nobody_listens_after_the_last_has_left() -> None:
    kinds = (JITFunction, InterpretedFunction)
    before = [kind.run for kind in kinds]
    one, other = OpTrace(), OpTrace()
    with torch.no_grad(), one.following():
        with other.following():
            scaled(X, 2.0)
        scaled(X, 2.0)
    assert [len(launches(trace)) for trace in (one, other)] == [2, 1]
    assert [kind.run for kind in kinds] == before
    assert not followers


# -- no alarm -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("test_triton_launches::scaled", mutates_args=())
def op_with_scratch(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What an op makes for itself no dispatcher sees."""
    scratch = torch.empty_like(x)
    scale_rows[(1,)](x, scratch, _gain["value"], x.numel())
    return scaled(scratch, scale)


_gain = {"value": 1.0}


def test_memory_that_an_op_makes_for_itself_is_no_difference() -> None:
    assert difference(lambda: op_with_scratch(X, 2.0) + 1, lambda: op_with_scratch(X, 2.0) + 1) is None


def test_a_number_of_a_launch_inside_of_an_op_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = traced(lambda: op_with_scratch(X, 2.0))
    monkeypatch.setitem(_gain, "value", 5.0)
    found = find_difference(one, traced(lambda: op_with_scratch(X, 2.0)), dict)
    assert found is not None
    assert "(scale=) gets 1.0 with one sample and 5.0 with another" in found.problem


def test_an_op_that_raises_leaves_the_trace_as_it_was() -> None:
    def body() -> None:
        with pytest.raises(RuntimeError):
            torch.mm(X, X)
        scaled(X, 2.0)

    (found,) = launches(traced(body))
    assert dict(found.arguments)["x_ptr"].memory >= 0


def test_an_address_that_is_passed_as_a_number_is_known_by_its_memory() -> None:
    """Memory of the body is elsewhere in every run, and in a recording where it was recorded."""
    kept: list[torch.Tensor] = []

    def run(start: int) -> OpTrace:
        trace = OpTrace()
        with torch.no_grad(), trace.following():
            made = torch.ones(1 << 12, device=ON)
            kept.append(made)
            trace.add_launch("by_address", (1,), {"at": made.data_ptr() + start, "of": X.data_ptr()})
        return trace

    one, other, moved = run(16), run(16), run(32)
    noted = dict(launches(one)[0].arguments)
    assert isinstance(noted["at"], Address)
    assert noted["of"] == X.data_ptr()
    assert find_difference(one, other, dict) is None
    assert find_difference(one, moved, dict) is not None


def test_numbers_of_numpy_are_compared_by_value() -> None:
    np = pytest.importorskip("numpy")
    traces = OpTrace(), OpTrace(), OpTrace()
    for trace, number in zip(traces, (np.int64(3), np.int64(3), np.int64(4)), strict=True):
        trace.add_launch("counted", (1,), {"count": number})
    assert find_difference(traces[0], traces[1], dict) is None
    assert find_difference(traces[0], traces[2], dict) is not None


# -- the guard ----------------------------------------------------------------------------------------------------


def _sample(extent: Extent, seed: int) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(extent.used["seqs"], WIDTH, generator=numbers), "scale": 1 / (1 + seed)}


@pytest.mark.skipif(ON != "cpu", reason="the emulated device's memory, which only interpreted kernels take")
def test_the_guard_refuses_a_number_in_a_users_launch() -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        return scaled(batch["x"] + 1, batch["scale"])

    def right(batch: dict[str, Any]) -> torch.Tensor:
        return scaled(batch["x"] + 1, 2.0)

    runner = make_runner(body, EmulatedDevice(), sample=_sample, sizes=(1, 2))
    assert not runner.captured
    assert runner.report is not None
    error = runner.report.failures[0].error
    assert isinstance(error, HostConstantError)
    assert error.op == "kernel scale_rows"
    assert "(scale=) gets 1.0 with one sample and 0.5 with another" in str(error)
    assert "test_triton_launches.py:" in str(error)
    good = make_runner(right, EmulatedDevice(), sample=_sample, sizes=(1, 2))
    assert len(good.captured) == 2
    assert guard(good).ok


def test_a_tensor_of_a_launch_is_noted_like_that_of_an_op() -> None:
    (found,) = launches(traced(lambda: scaled(X, 2.0)))
    note = dict(found.arguments)["x_ptr"]
    assert isinstance(note, TensorNote)
    assert (note.shape, note.dtype, note.form) == ((COUNT,), torch.float32, (0, 1))
