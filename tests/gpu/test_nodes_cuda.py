"""Nodes of real CUDA graphs: read, named, and compared."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phonograph import Extent, Runner, RunnerOptions, graph_break, open_device
from phonograph.devices.nodes import joined, keeping_nodes, node_counter, nodes_of
from phonograph.graphs.trust.guard import _Runs, guard
from runners import WIDTH, make_runner, rows

pytestmark = pytest.mark.gpu
triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")

Body = Callable[[dict[str, Any]], Any]


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(extent.used["seqs"], WIDTH, generator=numbers).cuda()
    return {"x": x, "scale": 1 / (2 + seed), "mask": torch.ones(8 * WIDTH, device="cuda")}


def captured(body: Body, **options: Any) -> Runner:
    return make_runner(body, open_device("cuda"), sample=sample, sizes=(4, 8), **options)


@functools.cache
def ones() -> torch.Tensor:
    return torch.ones(8 * WIDTH, device="cuda")


@functools.cache
def weight() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, device="cuda")


def right(batch: dict[str, Any]) -> Any:
    return (batch["x"] @ weight()).relu() + torch.rand_like(batch["x"])


def reduced(batch: dict[str, Any]) -> Any:
    """Structs with members that nobody sets."""
    x = batch["x"]
    return x.softmax(-1) + x.mean(0) + x.amax(-1, keepdim=True) + x.cumsum(0) + x.sort(-1).values


def halved(batch: dict[str, Any]) -> Any:
    x = batch["x"].half().repeat(1, 64)
    return (x @ x.T @ x).float() + torch.nn.functional.dropout(x, 0.5)


def gathered(batch: dict[str, Any]) -> Any:
    return batch["x"][batch["x"].argsort(0)[:, 0]].index_add(0, torch.arange(2, device="cuda"), batch["x"][:2])


def scaled(batch: dict[str, Any]) -> Any:
    return batch["x"] * batch["scale"]


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(x_ptr, mask_ptr, out_ptr, scale, count, size: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]
    at = tl.arange(0, size)
    x = tl.load(x_ptr + at, mask=at < count)
    mask = tl.load(mask_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x * scale + mask, mask=at < count)


def by_triton(x: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """A launch that torch does not dispatch."""
    out = torch.empty_like(x)
    scale_kernel[(1,)](x, mask, out, scale, x.numel(), size=8 * WIDTH)
    return out


def scaled_by_triton(batch: dict[str, Any]) -> Any:
    return by_triton(batch["x"], ones(), batch["scale"])


def own_mask(batch: dict[str, Any]) -> Any:
    return by_triton(batch["x"], batch["mask"], 2.0)


def right_by_triton(batch: dict[str, Any]) -> Any:
    return by_triton(batch["x"], ones(), 2.0)


def other_way(batch: dict[str, Any]) -> Any:
    return batch["x"].exp() if batch["scale"] == 0.5 else batch["x"].log1p()


@pytest.mark.parametrize("body", [right, reduced, halved, gathered, right_by_triton], ids=lambda body: body.__name__)
def test_the_nodes_of_correct_bodies_agree(body: Body) -> None:
    good = captured(body)
    for _ in range(3):
        report = guard(good, nodes=True)
        assert report.ok, str(report)
        assert not any("nodes unseen" in text for text in report.unseen), str(report)
    assert good.run({"x": rows(good.device, 3), "scale": 1.0}).shape == (3, *body(sample(_of(3), 0)).shape[1:])


@pytest.mark.parametrize("body", [scaled, scaled_by_triton, own_mask, other_way], ids=lambda body: body.__name__)
def test_what_a_sample_froze_is_in_the_nodes(body: Body) -> None:
    """Ops are not compared here: the nodes alone must show it."""
    bad = captured(body, options=RunnerOptions(guard="off"))
    runs = _Runs(bad)
    with torch.no_grad(), runs.restored():
        difference, unseen = runs.node_difference(bad.captured[0])
    assert difference is not None, unseen
    assert difference.frame is not None, str(difference)
    assert difference.frame.file == __file__
    assert not guard(bad, nodes=True).ok


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_difference_in_nodes_names_the_line_that_recorded_them(backend: str) -> None:
    after_gap = graph_break(lambda x: x * 1.0)

    def body(batch: dict[str, Any]) -> Any:
        y = after_gap(batch["x"] + 1).relu().view(-1, WIDTH)
        y = by_triton(y @ weight(), ones(), 2.0).softmax(-1)
        y = y * batch["scale"]  # wrong
        return y.exp()

    bad = captured(body, options=RunnerOptions(guard="off"), backend=backend)
    runs = _Runs(bad)
    with torch.no_grad(), runs.restored():
        difference, unseen = runs.node_difference(bad.captured[0])
    source, first = inspect.getsourcelines(body)
    line = first + next(at for at, text in enumerate(source) if "# wrong" in text)
    assert difference is not None, unseen
    assert difference.frame is not None, str(difference)
    assert (difference.frame.file, difference.frame.line) == (__file__, line), str(difference)


def test_nodes_are_counted_while_they_are_recorded() -> None:
    device, x = open_device("cuda"), torch.ones(8, device="cuda")
    (x + 1).relu()
    num_nodes = node_counter(device)
    assert num_nodes is not None
    counts = []
    with keeping_nodes(device), device.recorder(device.new_pool()) as recorder:
        for _ in range(2):
            recorder.begin()
            counts.append(num_nodes())
            kept = x + 1
            counts.append(num_nodes())
            kept = kept.relu()
            counts.append(num_nodes())
            recorder.end().release()
    assert [count - counts[0] for count in counts] == [0, 1, 2, 3, 4, 5], "with a mark between the graphs"
    assert num_nodes() == 0
    assert kept.shape == (8,)


@pytest.mark.parametrize("body", [scaled_by_triton, own_mask], ids=lambda body: body.__name__)
def test_what_a_users_launch_froze_is_refused_at_capture(body: Body) -> None:
    """By its parameter's name and the line of the launch: the guard of ops, without nodes."""
    runner = captured(body)
    assert not runner.captured
    assert runner.report is not None
    told = str(runner.report.failures[0].error)
    assert f"kernel scale_kernel({'scale' if body is scaled_by_triton else 'mask_ptr'}=)" in told
    assert "test_nodes_cuda.py:" in told


def test_addresses_of_a_graphs_own_memory_are_known_as_such() -> None:
    """Else everything that the graph itself makes would be another number in every capture."""
    device = open_device("cuda")
    x = torch.ones(8 * WIDTH, device="cuda")
    by_triton(x, x, 2.0)  # compiled before
    with keeping_nodes(device), device.recorder(device.new_pool()) as recorder:
        recorder.begin()
        kept = by_triton(by_triton(x, x, 2.0), x, 3.0)
        graph = recorder.end()
    found = joined([nodes_of(graph)])
    places = [value for node in found.nodes for _, value in node.arguments if "own memory" in str(value)]
    assert len(places) >= 3, found
    assert found.unseen == ()
    assert kept.shape == (8 * WIDTH,)
    graph.release()


@functools.cache
def tables() -> list[torch.Tensor]:
    return [torch.randn(8, WIDTH, device="cuda") for _ in range(2)]


def copied(batch: dict[str, Any]) -> Any:
    """A copy of contiguous memory, which the driver makes without a kernel."""
    out = torch.empty_like(batch["x"])
    _driver_copy(out, tables()[batch["scale"] != 0.5])
    return out + batch["x"]


def copied_rightly(batch: dict[str, Any]) -> Any:
    out = torch.empty_like(batch["x"])
    _driver_copy(out, tables()[0])
    return out + batch["x"]


def filled(batch: dict[str, Any]) -> Any:
    out = torch.empty_like(batch["x"])
    _driver_fill(out, 1 if batch["scale"] == 0.5 else 2)
    return batch["x"] + out.view(torch.int32).float()


def filled_rightly(batch: dict[str, Any]) -> Any:
    out = torch.empty_like(batch["x"])
    _driver_fill(out, 1)
    return batch["x"] + out.view(torch.int32).float()


def _driver_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Past torch's dispatcher, as libraries do it."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    places = ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(source.data_ptr())
    assert ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2(*places, ctypes.c_size_t(target.nbytes), stream) == 0


def _driver_fill(target: torch.Tensor, value: int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    given = ctypes.c_uint64(target.data_ptr()), ctypes.c_ubyte(value), ctypes.c_size_t(target.nbytes)
    assert ctypes.CDLL("libcuda.so.1").cuMemsetD8Async(*given, stream) == 0


@pytest.mark.parametrize("body", [copied_rightly, filled_rightly], ids=lambda body: body.__name__)
def test_copies_and_fills_of_correct_bodies_agree(body: Body) -> None:
    report = guard(captured(body), nodes=True)
    assert report.ok, str(report)
    assert not any("memcpy" in text or "memset" in text for text in report.unseen), str(report)


@pytest.mark.parametrize("body", [copied, filled], ids=lambda body: body.__name__)
def test_what_a_sample_froze_in_a_copy_or_a_fill_is_found(body: Body) -> None:
    """No op and no kernel shows it."""
    report = guard(captured(body, options=RunnerOptions(guard="off")), nodes=True)
    assert len(report.findings) == 2, str(report)
    assert ("memcpy" if body is copied else "memset") in str(report)
    assert "test_nodes_cuda.py:" in str(report)


def _of(count: int) -> Extent:
    return Extent({"seqs": count}, {"seqs": count})
