"""CUDA alone: side streams, invalidated captures, the pool's memory, waits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from phonograph.devices import DeviceGraph, MemoryPool, Recorder, open_device
from phonograph.devices.cuda import CudaDevice, CudaPool, release_all
from phonograph.errors import DeviceError, HostConstantError, HostReadError

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> CudaDevice:
    return CudaDevice()


def record(cuda: CudaDevice, body: Callable[[], Any], pool: MemoryPool | None = None) -> tuple[DeviceGraph, Any]:
    with torch.no_grad(), cuda.recorder(pool if pool is not None else cuda.new_pool()) as recorder:
        recorder.begin()
        outputs = body()
        graph = recorder.end()
    return graph, outputs


def rehearse(cuda: CudaDevice, body: Callable[[], Any]) -> None:
    with torch.no_grad(), cuda.rehearsal() as rehearsal:
        rehearsal.begin()
        body()
        rehearsal.end()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


# -- side streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, -1])
def test_a_side_stream_is_joined_before_a_gap_and_forked_again_after_it(cuda: CudaDevice, priority: int) -> None:
    x, side = ones(1 << 16), torch.cuda.Stream(priority=priority)

    def before_the_gap() -> tuple[torch.Tensor, torch.Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = x + 1
        return a, x * 2

    def after_the_gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):  # no wait: the body believes that it has forked already
            c = a + 1
        d = b + 1
        torch.cuda.current_stream().wait_stream(side)
        return c + d

    with torch.no_grad(), cuda.recorder(cuda.new_pool()) as recorder:
        recorder.begin()
        a, b = before_the_gap()
        first = recorder.end()
        first.replay()
        recorder.begin()
        e = after_the_gap(a, b)
        second = recorder.end()
    for value in (5, 7):
        x.fill_(value)
        first.replay()
        second.replay()
        cuda.synchronize()
        assert e.unique().tolist() == [value + 2 + value * 2 + 1]
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()


def test_a_side_stream_need_not_be_joined_at_the_end(cuda: CudaDevice) -> None:
    x, side = ones(4), torch.cuda.Stream()

    def body() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x + 1

    graph, y = record(cuda, body)
    x.fill_(3)
    graph.replay()
    cuda.synchronize()
    assert y.tolist() == [4] * 4


def test_a_body_that_fails_with_a_forked_stream_leaves_it_usable(cuda: CudaDevice) -> None:
    pool, x, side = cuda.new_pool(), ones(4), torch.cuda.Stream()

    def body() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(cuda, body, pool)
    with torch.cuda.stream(side):
        y = x + 1
    cuda.synchronize()
    assert y.tolist() == [2] * 4
    check_next_capture(cuda, pool)


def test_the_callers_stream_waits_for_the_capture_stream_and_back(cuda: CudaDevice) -> None:
    outer = torch.cuda.Stream()
    with torch.cuda.stream(outer):
        x = torch.zeros(1 << 22, device="cuda")
        for _ in range(50):
            x.add_(1)
        with torch.no_grad(), cuda.rehearsal():
            y = x * 2
        z = y + 1
        graph, w = record(cuda, lambda: x + 1)
        graph.replay()
        assert torch.cuda.current_stream() == outer
    cuda.synchronize()
    assert z.unique().tolist() == [101]
    assert w.unique().tolist() == [51]


def test_another_thread_may_allocate_and_copy_during_capture(cuda: CudaDevice) -> None:
    stop, failures = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                size = 1
                while not stop.is_set():
                    size = size % 4096 + 1
                    assert torch.ones(size * 1000, device="cuda")[0].item() == 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        x, pool = ones(1000), cuda.new_pool()
        for _ in range(20):
            graph, y = record(cuda, lambda: (x * 2 + 1) * 3, pool)
            graph.replay()
            cuda.synchronize()
            assert y[0].item() == 9
    finally:
        stop.set()
        thread.join()
    assert not failures


# -- failed captures ------------------------------------------------------------------------------------------


def check_next_capture(cuda: CudaDevice, pool: MemoryPool) -> None:
    x = ones(3)
    assert torch.rand(4, device="cuda").tolist() != torch.rand(4, device="cuda").tolist()
    graph, (y, noise) = record(cuda, lambda: (x * 2 + 1, torch.rand(4, device="cuda")), pool)
    drawn = []
    for _ in range(2):
        graph.replay()
        cuda.synchronize()
        drawn.append(noise.tolist())
    assert y.tolist() == [3] * 3
    assert drawn[0] != drawn[1]
    assert not torch.cuda.is_current_stream_capturing()


def raises_at_once(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.rand_like(x)
    torch.cuda.synchronize()
    return y


def raises_at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.rand_like(x)
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    return y


def raises_in_a_copy(x: torch.Tensor) -> list[float]:
    return (x + torch.rand_like(x)).tolist()


@pytest.mark.parametrize("body", [raises_at_once, raises_at_the_end, raises_in_a_copy])
def test_an_invalidated_capture_is_unwound(cuda: CudaDevice, body: Callable[[torch.Tensor], Any]) -> None:
    pool, x = cuda.new_pool(), ones(1 << 20)
    check_next_capture(cuda, pool)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            record(cuda, lambda: body(x), pool)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        check_next_capture(cuda, pool)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    cuda.synchronize()
    assert x[0].item() == 1


def test_failures_do_not_grow_the_pool(cuda: CudaDevice) -> None:
    pool, x = cuda.new_pool(), ones(1 << 20)

    def failing() -> None:
        with pytest.raises(RuntimeError):
            record(cuda, lambda: raises_at_once(x), pool)

    failing()
    gc.collect()
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        failing()
        gc.collect()
    assert torch.cuda.memory_reserved() == reserved


# -- graphs and pools -----------------------------------------------------------------------------------------


def test_release_all_releases_every_graph(cuda: CudaDevice) -> None:
    x = ones(3)
    graphs = [record(cuda, lambda: x + 1)[0] for _ in range(3)]
    release_all()
    for graph in graphs:
        with pytest.raises(DeviceError, match="released"):
            graph.replay()
    check_next_capture(cuda, cuda.new_pool())


def test_a_pool_survives_the_release_of_its_last_graph(cuda: CudaDevice) -> None:
    pool, x = cuda.new_pool(), ones(1 << 20)
    for _ in range(2):
        graph, y = record(cuda, lambda: x * 2 + 1, pool)
        graph.replay()
        cuda.synchronize()
        assert y[0].item() == 3
        graph.release()
        del graph, y
        gc.collect()
        torch.cuda.empty_cache()
    check_next_capture(cuda, pool)


def test_graphs_of_one_pool_use_the_same_memory(cuda: CudaDevice) -> None:
    pool, x, out = cuda.new_pool(), ones(1 << 22), ones(1 << 22)

    def body() -> None:
        out.copy_((x + 1) * 2 + 3)

    record(cuda, body, pool)
    held = [record(cuda, body, pool)]
    reserved = torch.cuda.memory_reserved()
    held += [record(cuda, body, pool) for _ in range(5)]
    assert torch.cuda.memory_reserved() == reserved
    for graph, _ in held:
        out.zero_()
        graph.replay()
        cuda.synchronize()
        assert out[-1].item() == 7


def test_poison_touches_only_free_blocks_of_the_pool(cuda: CudaDevice) -> None:
    pool, x, outside = cuda.new_pool(), ones(1000), ones(1000)
    graph, outputs = record(cuda, lambda: (x * 3, x * 5), pool)
    held, freed = outputs[1], cuda.weak(outputs[0])
    del outputs
    gc.collect()
    graph.replay()
    cuda.synchronize()
    assert freed[0].item() == 3
    for pattern, byte in enumerate((0x3C, 0xBC)):
        pool.poison(pattern)
        cuda.synchronize()
        assert freed.view(torch.uint8).unique().tolist() == [byte]
        assert freed.isfinite().all().item()
        assert held.eq(5).all().item()
        assert x.eq(1).all().item()
        assert outside.eq(1).all().item()
    graph.replay()
    cuda.synchronize()
    assert freed.eq(3).all().item()


def test_weak_does_not_keep_memory(cuda: CudaDevice) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    weak = cuda.weak(ones(1 << 20))
    assert torch.cuda.memory_allocated() == before
    assert weak.shape == (1 << 20,)


def test_a_pool_owns_memory_by_address(cuda: CudaDevice) -> None:
    pool, x = cuda.new_pool(), ones(1000)
    _, y = record(cuda, lambda: x + 1, pool)
    assert isinstance(pool, CudaPool)
    assert pool.owns(cuda.weak(y))
    assert pool.owns(cuda.weak(y[10:]))
    assert not pool.owns(ones(1000))


# -- waits ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sync_mode() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.usefixtures("sync_mode")
@pytest.mark.parametrize("found", [0, 1])
def test_the_sync_debug_mode_is_restored_as_found(cuda: CudaDevice, found: int) -> None:
    torch.cuda.set_sync_debug_mode(found)
    with cuda.rehearsal() as rehearsal:
        assert torch.cuda.get_sync_debug_mode() == found
        for _ in range(2):
            rehearsal.begin()
            assert torch.cuda.get_sync_debug_mode() == 2
            rehearsal.end()
            assert torch.cuda.get_sync_debug_mode() == found
        rehearsal.begin()
        rehearsal.abort()
        assert torch.cuda.get_sync_debug_mode() == found
    with pytest.raises(HostReadError):
        rehearse(cuda, lambda: ones(1).item())
    assert torch.cuda.get_sync_debug_mode() == found


def test_waits_below_the_dispatcher_are_refused_in_rehearsal(cuda: CudaDevice) -> None:
    x = ones(2)
    with pytest.raises(RuntimeError, match="synchronizing"):
        rehearse(cuda, lambda: torch.cuda.current_stream().synchronize())
    with pytest.raises(HostConstantError):
        rehearse(cuda, lambda: torch.tensor(5.0, device="cuda"))
    with pytest.raises(HostReadError):
        rehearse(cuda, lambda: x.to("cpu"))
    with pytest.raises(HostReadError):
        rehearse(cuda, lambda: torch.zeros(2).copy_(x))
    with pytest.raises(HostConstantError):
        rehearse(cuda, lambda: x.copy_(torch.zeros(2)))
    with pytest.raises(HostConstantError):
        rehearse(cuda, lambda: torch.zeros(2).cuda())


def test_copies_of_pinned_memory_are_recorded(cuda: CudaDevice) -> None:
    x, read, written = ones(2), torch.zeros(2).pin_memory(), torch.zeros(2).pin_memory()

    def body() -> None:
        x.copy_(read, non_blocking=True)
        written.copy_(x * 2, non_blocking=True)

    rehearse(cuda, body)
    graph, _ = record(cuda, body)
    for value in (3, 4):
        read.fill_(value)
        graph.replay()
        cuda.synchronize()
        assert written.tolist() == [value * 2] * 2


def test_work_on_the_host_is_not_refused(cuda: CudaDevice) -> None:
    lengths = torch.tensor([3, 1, 2])

    def body() -> None:
        assert lengths.max().item() == 3
        assert lengths.tolist() == [3, 1, 2]
        assert lengths.nonzero().shape == (3, 1)

    rehearse(cuda, body)


# -- opening --------------------------------------------------------------------------------------------------


def test_an_index_beyond_the_last_device_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=f"torch finds {count}"):
        open_device(f"cuda:{count}")
    assert open_device("cuda:0").torch_device == torch.device("cuda", 0)
    assert open_device().name == "cuda"


def test_without_a_visible_gpu_the_device_is_emulated() -> None:
    code = "import phonograph; print(phonograph.open_device().name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "emulated"


def test_a_second_begin_is_refused_and_unwound(cuda: CudaDevice) -> None:
    pool, x = cuda.new_pool(), ones(3)

    def nested(recorder: Recorder) -> None:
        recorder.begin()
        x.add_(1)
        recorder.begin()

    def run() -> None:
        with torch.no_grad(), cuda.recorder(pool) as recorder:
            nested(recorder)

    with pytest.raises(DeviceError):
        run()
    check_next_capture(cuda, pool)
