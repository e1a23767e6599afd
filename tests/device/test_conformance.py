"""What every device must do, in one suite that runs on each device present."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phonograph.devices import Device, DeviceGraph, Hardware, MemoryPool, Recorder
from phonograph.errors import CaptureError, DataDependentShapeError, DeviceError, HostConstantError, HostReadError

Mode = Callable[[], AbstractContextManager[Any]]
MODES: list[Mode] = [torch.no_grad, torch.inference_mode]


def record(
    device: Device, body: Callable[[], Any], pool: MemoryPool | None = None, mode: Mode = torch.no_grad
) -> tuple[DeviceGraph, Any]:
    """One graph of the body, and what the body returned while it was recorded."""
    with mode(), device.recorder(pool if pool is not None else device.new_pool()) as recorder:
        recorder.begin()
        outputs = body()
        graph = recorder.end()
    return graph, outputs


def values(device: Device, tensor: torch.Tensor) -> Any:
    """What a tensor holds once the device has done all its work."""
    device.synchronize()
    return tensor.tolist()


def floats(device: Device, *numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device.torch_device)


# -- record and replay ----------------------------------------------------------------------------------------


def test_recording_runs_nothing_outside_and_replay_does(device: Device) -> None:
    x, state = floats(device, 1, 2), floats(device, 10, 20)

    def body() -> torch.Tensor:
        state.add_(x)
        return state * 2

    graph, y = record(device, body)
    assert values(device, state) == [10, 20]
    graph.replay()
    assert values(device, state) == [11, 22]
    assert values(device, y) == [22, 44]


def test_replay_sees_new_input_values_at_fixed_addresses(device: Device) -> None:
    x = floats(device, 1, 2)
    graph, y = record(device, lambda: x * 3 + 1)
    address = y.data_ptr()
    for first in (5.0, -7.0, 0.0):
        x.fill_(first)
        graph.replay()
        assert values(device, y) == [first * 3 + 1] * 2
        assert y.data_ptr() == address


def test_in_place_writes_happen_once_per_replay(device: Device) -> None:
    steps = torch.zeros(3, dtype=torch.int64, device=device.torch_device)
    graph, _ = record(device, lambda: steps.add_(1))
    for count in range(1, 5):
        graph.replay()
        assert values(device, steps) == [count] * 3


def test_writes_through_a_view_and_by_index_are_replayed(device: Device) -> None:
    cache = torch.zeros(4, 3, device=device.torch_device)
    rows = torch.tensor([2, 0], device=device.torch_device)
    x = torch.ones(2, 3, device=device.torch_device)

    def body() -> None:
        cache.index_put_((rows,), x)
        cache[:, 1].mul_(2)

    graph, _ = record(device, body)
    assert values(device, cache) == [[0, 0, 0]] * 4
    rows.copy_(torch.tensor([3, 1]))
    graph.replay()
    assert values(device, cache) == [[0, 0, 0], [1, 2, 1], [0, 0, 0], [1, 2, 1]]


def test_an_input_written_in_place_is_read_in_order(device: Device) -> None:
    x = floats(device, 1, 2)

    def body() -> torch.Tensor:
        before = x * 10
        x.add_(1)
        return before + x

    graph, y = record(device, body)
    graph.replay()
    assert values(device, y) == [12, 23]
    graph.replay()
    assert values(device, y) == [23, 34]


@pytest.mark.parametrize("mode", [*MODES, torch.enable_grad])
def test_modes_around_do_not_matter(device: Device, mode: Mode) -> None:
    weight = torch.nn.Parameter(floats(device, 2, 3))
    x, state = floats(device, 1, 1), floats(device, 0, 0)

    @torch.no_grad()
    def body() -> torch.Tensor:
        y = x * weight
        state.add_(y)
        return y.reshape(2, 1).expand(2, 2).contiguous().sum(1)

    graph, y = record(device, body, mode=mode)
    for replay_mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        x.fill_(5)
        state.zero_()
        with replay_mode():
            graph.replay()
        assert values(device, y) == [20, 30]
        assert values(device, state) == [10, 15]


def test_one_recording_may_have_several_graphs_with_eager_work_between(device: Device) -> None:
    x, gap = floats(device, 1, 2), floats(device, 0, 0)
    with torch.no_grad(), device.recorder(device.new_pool()) as recorder:
        recorder.begin()
        y = x + 1
        first = recorder.end()
        first.replay()
        gap.copy_(y * 10)
        assert values(device, gap) == [20, 30]
        recorder.begin()
        z = gap + y
        second = recorder.end()
    x.fill_(4)
    first.replay()
    gap.copy_(y * 100)
    second.replay()
    assert values(device, z) == [505, 505]


# -- pools ----------------------------------------------------------------------------------------------------


def test_graphs_of_one_pool_replayed_in_turn_are_each_right(device: Device) -> None:
    pool, x = device.new_pool(), torch.ones(64, device=device.torch_device)

    def body(factor: int) -> torch.Tensor:
        y = x * factor
        for _ in range(4):
            y = y + 1
        return y * 2

    graphs = {factor: record(device, partial(body, factor), pool) for factor in (3, 5, 7)}
    for number, factor in enumerate((3, 5, 3, 7, 5, 7, 3)):
        x.fill_(number)
        graph, y = graphs[factor]
        graph.replay()
        assert values(device, y) == [(number * factor + 4) * 2] * 64


def test_a_pool_owns_what_its_recordings_made(device: Device) -> None:
    pool, other = device.new_pool(), device.new_pool()
    x = torch.ones(8, device=device.torch_device)
    _, y = record(device, lambda: x + 1, pool)
    assert pool.owns(y)
    assert pool.owns(y[2:4])
    assert not pool.owns(x)
    assert not other.owns(y)


def test_poison_does_not_change_what_a_replay_gives(device: Device) -> None:
    pool, x = device.new_pool(), floats(device, 1, 2)
    graph, y = record(device, lambda: (x * 2 + 1) * 3, pool)
    record(device, lambda: x * 100, pool)
    for pattern in (0, 1):
        pool.poison(pattern)
        graph.replay()
        assert values(device, y) == [9, 15]
    assert values(device, x) == [1, 2]


def test_a_pool_outlives_its_graphs(device: Device) -> None:
    pool, x = device.new_pool(), floats(device, 1, 2)
    graph, _ = record(device, lambda: x + 1, pool)
    graph.release()
    graph, y = record(device, lambda: x + 2, pool)
    graph.replay()
    assert values(device, y) == [3, 4]


def test_a_pool_of_another_kind_is_refused(device: Device) -> None:
    class Foreign:
        def owns(self, tensor: torch.Tensor) -> bool:
            return False

        def poison(self, pattern: int) -> None: ...

    with pytest.raises(DeviceError, match=r"Foreign.*new_pool"), device.recorder(Foreign()):
        pass


def test_a_released_graph_is_not_replayed(device: Device) -> None:
    x = floats(device, 1, 2)
    graph, _ = record(device, lambda: x + 1)
    graph.release()
    graph.release()
    with pytest.raises(DeviceError, match="released"):
        graph.replay()


# -- what can't be recorded -----------------------------------------------------------------------------------

Body = Callable[[torch.Tensor], object]

HOST_READS: dict[str, Body] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "branch": lambda x: 1 if (x > 0).all() else 2,
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "index": lambda x: x[x.argmax()],
    "range": lambda x: list(range(x.argmax())),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: str(x) + "\n",
    "format": lambda x: f"{x.sum():.2f}",
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
}
SHAPES: dict[str, Body] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask write": lambda x: x.clone().index_put_((x > -1e9,), x + 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.argsort()),
}
CONSTANTS: dict[str, Body] = {
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "numpy": lambda x: torch.from_numpy(np.ones(2)).to(x.device),
    "to": lambda x: torch.tensor([1.0, 2.0]).to(x.device),
}
REFUSED: list[Any] = [
    pytest.param(body, kind, id=f"{kind.__name__}-{name}")
    for kind, table in ((HostReadError, HOST_READS), (DataDependentShapeError, SHAPES), (HostConstantError, CONSTANTS))
    for name, body in table.items()
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("body", "kind"), REFUSED)
def test_rehearsal_refuses_by_name(device: Device, body: Body, kind: type[CaptureError], mode: Mode) -> None:
    x = floats(device, 1, 2)
    with mode(), device.rehearsal() as rehearsal:
        body(x)  # nothing is refused before it begins
        rehearsal.begin()
        with pytest.raises(kind) as caught:
            body(x)
        with pytest.raises(kind):
            rehearsal.end()  # whoever catches it goes no further
        body(x)  # nor after it has ended
    frame = caught.value.frame
    assert frame is not None
    assert (Path(frame.file).name, frame.line) == (Path(__file__).name, body.__code__.co_firstlineno)
    assert caught.value.op
    assert "." in str(caught.value)


def rehearse(device: Device, body: Callable[[], object], mode: Mode = torch.no_grad) -> None:
    with mode(), device.rehearsal() as rehearsal:
        rehearsal.begin()
        body()
        rehearsal.end()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("body", "kind"), REFUSED)
def test_after_a_refusal_nothing_is_refused_any_more(
    device: Device, body: Body, kind: type[CaptureError], mode: Mode
) -> None:
    x = floats(device, 1, 2)
    with pytest.raises(kind):
        rehearse(device, lambda: body(x), mode)
    body(x)


@pytest.mark.parametrize("mode", MODES)
def test_rehearsal_allows_what_a_graph_can_hold(device: Device, mode: Mode) -> None:
    x, state = floats(device, 3, -2, 1), floats(device, 0, 0, 0)
    index = torch.tensor([2, 0], device=device.torch_device)

    def body() -> torch.Tensor:
        state.add_(x)
        x[x > 2] = 0.0
        picked = x[index] + torch.zeros(2, device=x.device) * torch.tensor(2.0)
        hot = torch.nn.functional.one_hot(index, 3)
        twice = x.repeat_interleave(torch.ones_like(x, dtype=torch.int64), output_size=3)
        return picked.sum() + hot.sum() + twice.sort()[0][0] + torch.where(x > 0, x, 0.0).sum()

    with mode(), device.rehearsal() as rehearsal:
        rehearsal.begin()
        y = body()
        rehearsal.end()
    assert values(device, y) == 1 + 2 - 2 + 1
    assert values(device, state) == [3, -2, 1]


def test_rehearsal_runs_everything_and_records_nothing(device: Device) -> None:
    state = floats(device, 0, 0)
    with torch.no_grad(), device.rehearsal() as rehearsal:
        for _ in range(2):
            rehearsal.begin()
            state.add_(1)
            graph = rehearsal.end()
    graph.replay()
    graph.release()
    assert values(device, state) == [2, 2]


def test_a_generator_of_its_own_is_refused(device: Device) -> None:
    own = torch.Generator(device.torch_device)
    with pytest.raises(CaptureError, match="generator"):
        rehearse(device, lambda: torch.rand(3, generator=own, device=device.torch_device))


# -- failures -------------------------------------------------------------------------------------------------


def check_usable(device: Device, pool: MemoryPool) -> None:
    """Plain work, random numbers and the next recording, all as if nothing had happened."""
    place = device.torch_device
    assert values(device, torch.ones(3, device=place) + 1) == [2, 2, 2]
    big = torch.zeros(1 << 16, device=place)
    assert values(device, big.sum()) == 0
    assert values(device, torch.rand(4, device=place)) != values(device, torch.rand(4, device=place))
    x = floats(device, 1, 2)
    for into in (pool, device.new_pool()):
        graph, (y, noise) = record(device, lambda: (x * 2 + 1, torch.rand(4, device=place)), into)
        graph.replay()
        assert values(device, y) == [3, 5]
        first = values(device, noise)
        graph.replay()
        assert values(device, noise) != first


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_the_body_leaves_the_device_usable(device: Device, mode: Mode) -> None:
    pool, state = device.new_pool(), floats(device, 1, 2)

    def body() -> None:
        state.add_(torch.rand(2, device=state.device) * 5)
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            record(device, body, pool, mode)
    assert values(device, state) == [1, 2]
    check_usable(device, pool)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["item", "bool", "tolist", "cpu", "equal"])
def test_a_host_read_in_a_recording_leaves_the_device_usable(device: Device, name: str, mode: Mode) -> None:
    pool, state = device.new_pool(), floats(device, 1, 2)

    def body() -> None:
        state.add_(torch.rand(2, device=state.device))
        HOST_READS[name](state)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            record(device, body, pool, mode)
    assert values(device, state) == [1, 2]
    check_usable(device, pool)


@pytest.mark.parametrize("name", ["nonzero", "mask", "unique"])
def test_a_data_dependent_shape_in_a_recording_leaves_the_device_usable(device: Device, name: str) -> None:
    pool, x = device.new_pool(), floats(device, 1, 2)
    with pytest.raises(RuntimeError):
        record(device, lambda: SHAPES[name](x + 1), pool)
    check_usable(device, pool)


def test_an_exception_between_two_graphs_leaves_the_device_usable(device: Device) -> None:
    pool, x = device.new_pool(), floats(device, 1, 2)

    @torch.inference_mode()
    def body(recorder: Recorder) -> None:
        x.add_(1)
        recorder.end().replay()
        raise ZeroDivisionError

    def run() -> None:
        with torch.no_grad(), device.recorder(pool) as recorder:
            recorder.begin()
            body(recorder)

    with pytest.raises(ZeroDivisionError):
        run()
    assert values(device, x) == [2, 3]
    check_usable(device, pool)


def test_an_exception_between_two_rehearsals_leaves_the_device_usable(device: Device) -> None:
    @torch.inference_mode()
    def body(rehearsal: Recorder) -> None:
        rehearsal.end()
        raise ZeroDivisionError

    def run() -> None:
        with torch.no_grad(), device.rehearsal() as rehearsal:
            rehearsal.begin()
            body(rehearsal)

    with pytest.raises(ZeroDivisionError):
        run()
    check_usable(device, device.new_pool())


def test_abort_drops_what_was_recorded(device: Device) -> None:
    pool, state = device.new_pool(), floats(device, 1, 2)
    with torch.no_grad(), device.recorder(pool) as recorder:
        recorder.begin()
        state.add_(1)
        recorder.abort()
        recorder.abort()
        assert values(device, state) == [1, 2]
        recorder.begin()
        y = state * 2
        graph = recorder.end()
    graph.replay()
    assert values(device, y) == [2, 4]


def test_begin_and_end_come_in_pairs(device: Device) -> None:
    with torch.no_grad(), device.recorder(device.new_pool()) as recorder:
        with pytest.raises(DeviceError, match="not begun"):
            recorder.end()
        recorder.begin()
        with pytest.raises(DeviceError, match="while one is being recorded"):
            recorder.begin()
        recorder.end()
    check_usable(device, device.new_pool())


# -- random numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_each_replay_draws_fresh_numbers(device: Device, mode: Mode) -> None:
    def body() -> tuple[torch.Tensor, ...]:
        return (
            torch.rand(8, device=device.torch_device),
            torch.randn(8, device=device.torch_device),
            torch.nn.functional.dropout(torch.ones(64, device=device.torch_device), 0.5, training=True),
        )

    graph, outputs = record(device, body, mode=mode)
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append([values(device, y) for y in outputs])
    for one in range(3):
        for other in range(one):
            assert all(a != b for a, b in zip(drawn[one], drawn[other], strict=True))


def test_recording_does_not_advance_the_generator(device: Device) -> None:
    def draw() -> Any:
        return values(device, torch.rand(4, device=device.torch_device))

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert draw() == first
    record(device, lambda: torch.rand(100, device=device.torch_device))
    assert draw() == second


def test_a_seed_fixes_what_a_replay_draws(device: Device) -> None:
    graph, y = record(device, lambda: torch.rand(8, device=device.torch_device))
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        graph.replay()
        drawn.append(values(device, y))
    assert drawn[0] == drawn[1]


# -- the rest of the protocol ---------------------------------------------------------------------------------

WEAK: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "float32": lambda place: torch.randn(3, 4, device=place),
    "bfloat16": lambda place: torch.randn(3, 4, device=place).to(torch.bfloat16),
    "float8": lambda place: torch.randn(3, 4, device=place).to(torch.float8_e4m3fn),
    "bool": lambda place: torch.ones(5, dtype=torch.bool, device=place),
    "int8 at an odd offset": lambda place: torch.arange(9, dtype=torch.int8, device=place)[3:],
    "int64": lambda place: torch.arange(6, device=place),
    "complex64": lambda place: torch.randn(3, dtype=torch.complex64, device=place),
    "transposed": lambda place: torch.randn(3, 4, device=place).t(),
    "strided": lambda place: torch.randn(6, 8, device=place)[1::2, 2:7:3],
    "expanded": lambda place: torch.randn(3, 1, device=place).expand(3, 5),
    "scalar": lambda place: torch.randn((), device=place),
    "empty": lambda place: torch.empty(0, 4, device=place),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WEAK)
def test_weak_is_the_same_memory(device: Device, name: str, mode: Mode) -> None:
    with mode():
        tensor = WEAK[name](device.torch_device)
        weak = device.weak(tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert (weak.shape, weak.stride(), weak.dtype, weak.device) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )
    device.synchronize()
    assert str(weak.tolist()) == str(tensor.tolist())


@pytest.mark.parametrize("mode", MODES)
def test_weak_can_be_written_in_any_mode(device: Device, mode: Mode) -> None:
    with mode():
        tensor = torch.zeros(2, 3, device=device.torch_device).t()
        weak = device.weak(tensor)
    weak.add_(1)
    assert values(device, tensor) == [[1, 1]] * 3


def test_a_host_block_is_copied_from_and_written_again_after_its_fence(device: Device) -> None:
    block, fence = device.host_block(64), device.fence()
    fence.synchronize()  # a fence that nobody has recorded is passed
    assert (block.device.type, block.dtype, block.numel()) == ("cpu", torch.uint8, 64)
    target = torch.empty(64, dtype=torch.uint8, device=device.torch_device)
    for number in range(4):
        block.numpy()[:] = number
        target.copy_(block, non_blocking=True)
        fence.record()
        fence.synchronize()
        block.numpy()[:] = 99
        assert values(device, target) == [number] * 64


def test_memory_figures_are_sane(device: Device) -> None:
    before = device.memory()
    graph, _ = record(device, lambda: torch.ones(1 << 20, device=device.torch_device) + 1)
    device.synchronize()
    after = device.memory()
    for figures in (before, after):
        assert 0 <= figures.used <= figures.total
        assert figures.free == figures.total - figures.used
    assert after.total == before.total > 1 << 30
    assert after.used >= before.used
    graph.release()


def test_a_device_names_its_hardware(device: Device) -> None:
    assert device.hardware.name
    assert device.hardware == device.hardware
    if device.torch_device.type == "cpu":
        assert device.hardware == Hardware("cpu")
        assert not device.hardware.overlaps_launches


def test_a_seed_gives_the_same_numbers_again(device: Device) -> None:
    drawn = []
    for seed in (3, 4, 3):
        device.seed(seed)
        drawn.append(torch.rand(8, device=device.torch_device))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_device_says_what_it_can_do(device: Device) -> None:
    assert {"full", "breakable", "disabled"} <= device.capabilities.backends
    assert device.name == ("emulated" if device.torch_device.type == "cpu" else device.torch_device.type)
