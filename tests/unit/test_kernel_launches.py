"""Launches that go straight to what was compiled: when that is the same kernel, and what it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from phonograph.devices.op_trace import OpTrace
from phonograph.engine.ops.triton import kernel as module
from phonograph.engine.ops.triton.kernel import Kernel
from phonograph.errors import DeclarationError
from phonograph.graphs.recording.frozen_values import find_difference


class Compiled:
    """What Triton hands out once a kernel is compiled."""

    function = "function"
    packed_metadata = ("metadata",)

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.run = lambda *args: launches.append(args)


class Function(JITFunction):  # type: ignore[misc]
    """Triton's own way to launch; counts how often it is asked."""

    def __init__(self) -> None:
        self.arg_names = ["x_ptr", "out_ptr", "size", "scale", "block", "is_wide"]
        self.asked: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.asked.append((grid, args, constants))
            return Compiled(self.launches)

        return run


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    active = SimpleNamespace(get_current_stream=lambda index: f"stream {index}")
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    return Function()


def launch(kernel: Kernel, **changes: Any) -> None:
    x, out = changes.get("x", torch.zeros(32)), changes.get("out", torch.zeros(32))
    numbers = changes.get("size", 5), changes.get("scale", 0.5)
    constants = {"block": changes.get("block", 16), "is_wide": False, "num_warps": changes.get("num_warps", 4)}
    kernel[changes.get("grid", (3,))](x, out, *numbers, **constants)


def test_triton_is_asked_once(function: Function) -> None:
    kernel, x, out = Kernel(function), torch.zeros(32), torch.ones(32)
    for _ in range(3):
        launch(kernel)
    launch(kernel, x=x, out=out, grid=(3, 2))
    assert len(function.asked) == 1
    assert len(function.launches) == 3, "the first launch was Triton's"
    given = (x.data_ptr(), out.data_ptr(), 5, 0.5, 16, False)
    where = ("function", ("metadata",), None, None, None)
    assert function.launches[-1] == (3, 2, 1, "stream -1", *where, *given)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(32, dtype=torch.bfloat16)},
        {"x": torch.zeros(33)[1:]},
        {"out": torch.zeros(33)[1:]},
        {"size": 16},
        {"size": 1},
        {"block": 32},
        {"num_warps": 8},
    ],
    ids=["type", "alignment", "alignment of another", "number", "one", "constant", "option"],
)
def test_and_again_where_another_kernel_may_be_meant(function: Function, changes: dict[str, Any]) -> None:
    kernel = Kernel(function)
    launch(kernel)
    launch(kernel, **changes)
    assert len(function.asked) == 2
    launch(kernel)
    launch(kernel, **changes)
    assert len(function.asked) == 2


def test_what_is_remembered_has_an_end(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FOUND", 4)
    kernel = Kernel(function)
    for size in range(20):
        launch(kernel, size=size)
    assert len(kernel._found) <= 4
    assert len(function.asked) == 20


def test_a_trace_has_launches_by_named_arguments(function: Function) -> None:
    kernel = Kernel(function)
    function.__name__ = "scale_rows"
    traces = OpTrace(), OpTrace()
    for trace, size in zip(traces, (5, 7), strict=True):
        with trace.following():
            launch(kernel, size=size)
        with trace.paused():
            launch(kernel)
    found = [[op for op in trace.ops if op.name.startswith("kernel")] for trace in traces]
    assert [len(ops) for ops in found] == [1, 1]
    difference = find_difference(*traces, dict)
    assert difference is not None
    assert "kernel scale_rows(size=) gets 5 with one sample and 7 with another" in difference.problem
    assert difference.frame is not None
    assert difference.frame.file == __file__


def test_tensors_come_first() -> None:
    """Launches tell tensors from numbers by their places; the interpreter, which runs without a GPU, does not care."""
    function = Function()
    function.__name__ = "mixed"
    function.arg_names = ["x_ptr", "size", "out_ptr"]
    with pytest.raises(DeclarationError, match="the kernel mixed has numbers before tensors"):
        Kernel(function)
