"""Bisection: a planted fault is named by its segment, whatever it does and wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phonograph import Device, Runner, break_graph, current, graph_break
from phonograph.graphs.phases.decisions import Replay
from phonograph.graphs.trust.bisection import Bisected, bisect
from phonograph.graphs.trust.shadow import StatePart
from runners import WIDTH, make_runner, rows

NUM_LAYERS = 4


class Layers:
    """x through some layers, each of which writes state, with a gap after each; padded rows keep what memory held."""

    def __init__(self, device: Device) -> None:
        on = device.torch_device
        self.weights = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(n)).to(on) for n in range(4)]
        self.state = torch.zeros(NUM_LAYERS, 8, WIDTH, device=on)

    def __call__(self, batch: Any) -> torch.Tensor:
        x = batch["x"]
        for layer, weight in enumerate(self.weights):
            x = torch.tanh(x @ weight)
            self.state[layer, : x.shape[0]] = x
            out = torch.empty_like(x)
            x = self.attend(layer, x, out)
        return x + 1

    @graph_break
    def attend(self, layer: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        count = current().batch["x"].shape[0]  # the live rows alone, as attention does
        out[:count] = x[:count] * 2
        return out


def layered(device: Device, count: int = 2) -> tuple[Runner, Layers, list[StatePart]]:
    """State is what live rows may read."""
    layers = Layers(device)
    runner = make_runner(layers, device, sizes=(4,), backend="breakable")
    index = torch.arange(count, device=device.torch_device)
    return runner, layers, [StatePart("state", layers.state, 1, index)]


def plant(runner: Runner, step: int, fault: Callable[[], object]) -> None:
    """Do something more after one graph or gap of the recording."""
    (key,) = runner.captured
    steps: Any = runner.recording(key).steps
    usual = steps[step]

    def spoiled() -> None:
        usual()
        fault()

    steps[step] = spoiled


def given_to(runner: Runner, gap: int) -> torch.Tensor:
    """What the graph before a gap hands to it."""
    (key,) = runner.captured
    found: torch.Tensor = runner.recording(key).gaps[gap].arguments()[0][1]
    return found


def searched(runner: Runner, state: list[StatePart], device: Device, count: int = 2) -> Bisected:
    batch = {"x": rows(device, count)}
    assert isinstance(runner.decide(batch), Replay)
    before = [part.read() for part in state]
    counted = runner.stats.replays.total(), runner.stats.eager.total()
    found = bisect(runner, batch, state)
    for part, values in zip(state, before, strict=True):
        assert torch.equal(part.read(), values), "state is put back"
    assert (runner.stats.replays.total(), runner.stats.eager.total()) == counted, "nothing is counted"
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_a_right_recording_differs_nowhere(device: Device, count: int) -> None:
    runner, _, state = layered(device, count)
    found = searched(runner, state, device, count)
    assert (found.boundary, found.segment) == (None, None)
    assert str(found).startswith("none of its 5 segments differs when they run one by one: ")


@pytest.mark.parametrize("segment", range(1, NUM_LAYERS + 1))
@pytest.mark.parametrize("live", [False, True])
def test_the_first_segment_that_differs_is_named(device: Device, segment: int, live: bool) -> None:
    runner, layers, state = layered(device)

    def value() -> None:
        given_to(runner, segment - 1)[0, 1] += 1

    def written() -> None:
        layers.state[segment - 1, 0, 1] += 1

    plant(runner, 2 * (segment - 1), value if live else written)
    found = searched(runner, state, device)
    assert found.segment == segment
    said = str(found)
    assert said.startswith(f"segment {segment} of 5 is the first to differ, ")
    assert f"before gap {segment} (Layers.attend, layer={segment - 1}, test_bisection.py:" in said
    assert (f"after gap {segment - 1} (Layers.attend, layer={segment - 2}, " in said) == (segment > 1)
    assert "called at test_bisection.py:" in said
    assert ("argument x differs by up to 1" if live else "state after it differs by up to 1") in said


def test_the_last_segment_is_told_by_the_outputs(device: Device) -> None:
    runner, _, state = layered(device)
    (key,) = runner.captured
    plant(runner, 2 * NUM_LAYERS, lambda: runner.recording(key).outputs[0].add_(1))
    found = searched(runner, state, device)
    assert found.segment == 5
    assert str(found).startswith("segment 5 of 5 is the first to differ, after gap 4 (Layers.attend, layer=3, ")
    assert "output (the only one) differs" in str(found)


@pytest.mark.parametrize("gap", range(1, NUM_LAYERS + 1))
def test_a_gap_that_gives_something_else_is_named(device: Device, gap: int) -> None:
    runner, _, state = layered(device)
    (key,) = runner.captured
    plant(runner, 2 * gap - 1, lambda: runner.recording(key).gaps[gap - 1].outputs[0].add_(1))
    found = searched(runner, state, device)
    assert (found.boundary, found.segment) == (2 * gap - 1, None)
    assert str(found).startswith(f"gap {gap} of 4 (Layers.attend, layer={gap - 1}, test_bisection.py:")
    assert f"is the first to differ, between segments {gap} and {gap + 1}: " in str(found)


@pytest.mark.parametrize("segment", [1, 3])
def test_a_fault_that_needs_padding_is_found_with_it_and_not_without(device: Device, segment: int) -> None:
    runner, layers, state = layered(device)

    def only_padded() -> None:
        if not layers.state[0, 3].any():  # a padded row is 0
            given_to(runner, segment - 1)[0] *= 1.5

    plant(runner, 2 * (segment - 1), only_padded)
    assert searched(runner, state, device, 2).segment == segment
    assert searched(runner, state, device, 4).boundary is None


def test_a_fault_that_comes_once_is_not_found_again(device: Device) -> None:
    runner, layers, state = layered(device)
    left = [1]

    def once() -> None:
        if left and left.pop():
            given_to(runner, 0)[0] += 1

    plant(runner, 0, once)
    runner.run({"x": rows(device, 2)})
    layers.state.zero_()
    assert searched(runner, state, device).boundary is None


def test_without_gaps_there_is_one_segment(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, device, sizes=(4,))
    (key,) = runner.captured
    assert str(searched(runner, [], device)).startswith("its one segment does not differ when it runs alone")
    plant(runner, 0, lambda: runner.recording(key).outputs.add_(1))
    found = searched(runner, [], device)
    assert str(found).startswith("segment 1 of 1 is the first to differ: output (the only one) differs by up to 1")


def test_bare_breaks_are_boundaries_too(device: Device) -> None:
    state = torch.zeros(2, 4, WIDTH, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        x = batch["x"] + 1
        state[0, : x.shape[0]] = x
        break_graph()
        state[1, : x.shape[0]] = x * 2
        return x

    runner = make_runner(body, device, sizes=(4,), backend="breakable")
    parts = [StatePart("state", state, 1, torch.arange(4, device=device.torch_device))]
    plant(runner, 2, lambda: state[1].add_(1))
    found = searched(runner, parts, device)
    assert found.segment == 2
    assert "after gap 1 (_nothing, " in str(found)


def test_random_draws_are_the_same_in_every_run(device: Device) -> None:
    def body(batch: Any) -> torch.Tensor:
        x = batch["x"] + torch.rand_like(batch["x"])
        break_graph()
        return x + torch.rand_like(x)

    runner = make_runner(body, device, sizes=(4,), backend="breakable")
    before = torch.get_rng_state()
    assert searched(runner, [], device).boundary is None
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_eager_run_takes_from_unwritten_memory_is_said(device: Device) -> None:
    def body(batch: Any) -> torch.Tensor:
        x = torch.empty_like(batch["x"])
        break_graph()
        return x + batch["x"]

    runner = make_runner(body, device, sizes=(4,), backend="breakable")
    found = searched(runner, [], device)
    assert found.boundary is None
    assert "reads memory that nobody has written: output (the only one) differs" in str(found)
