"""Breaks: graphs with eager gaps between them."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from phonograph import BreakError, Device, EmulatedDevice, Runner, Stage, break_graph, current, graph_break
from phonograph.graphs.running.runner_options import RunnerOptions
from runners import WIDTH, equal, make_runner, rows


def broken(body: Any, device: Device, **more: Any) -> Runner:
    return make_runner(body, device, backend="breakable", **more)


def num_graphs(runner: Runner) -> int:
    return len(runner.recording(runner.captured[0]).graphs)


@graph_break
def negate(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_no_break_equals_full(device: Device) -> None:
    runner = broken(lambda batch: batch["x"] * 2, device)
    assert num_graphs(runner) == 1
    assert not runner.recording(runner.captured[0]).has_gaps


def test_full_records_marked_calls_with_the_rest_and_says_so(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(lambda batch: negate(batch["x"]), device)
    assert num_graphs(runner) == 1
    assert "negate is marked @graph_break" in caplog.text
    assert "Use backend='breakable', or call negate.inline" in caplog.text
    equal(runner.run({"x": rows(device, 3)}), -rows(device, 3))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_one_and_many_breaks(device: Device, count: int) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        x: torch.Tensor = batch["x"]
        for _ in range(count):
            x = negate(x + 1) * 2
        return x

    runner = broken(body, device)
    assert num_graphs(runner) == count + 1
    for seed in range(3):  # every replay sees its own inputs
        x = rows(device, 3, seed)
        equal(runner.run({"x": x}), body({"x": x}))


def test_break_graph_splits_with_nothing_between(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        y = batch["x"] + 1
        break_graph()
        z: torch.Tensor = y * 3
        return z

    runner = broken(body, device)
    assert num_graphs(runner) == 2
    equal(runner.run({"x": rows(device, 3)}), (rows(device, 3) + 1) * 3)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Result:
    hidden: torch.Tensor
    extra: dict[str, torch.Tensor]
    note: str = "same"


@dataclass(frozen=True)
class FrozenResult:
    hidden: torch.Tensor


class Box:
    """Any object with a tensor in it."""

    def __init__(self, t: torch.Tensor, scale: float = 1.0) -> None:
        self.t = t
        self.scale = scale


KINDS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda x: x * 2, lambda r: r),
    "tuple": (lambda x: (x * 2, x + 1), lambda r: r[0] + r[1]),
    "list": (lambda x: [x * 2], lambda r: r[0]),
    "dict": (lambda x: {"a": x * 2, "b": None}, lambda r: r["a"]),
    "named tuple": (lambda x: Pair(x * 2, x), lambda r: r.left - r.right),
    "dataclass": (lambda x: Result(x * 2, {"k": x}), lambda r: r.hidden + r.extra["k"]),
    "frozen dataclass": (lambda x: FrozenResult(x * 2), lambda r: r.hidden),
    "nested": (lambda x: ({"a": [x * 2, (x,)]}, None), lambda r: r[0]["a"][0] + r[0]["a"][1][0]),
    "object": (lambda x: Box(x * 2), lambda r: r.t),
    "object in a dict": (lambda x: {"a.b": Box(x * 2), "a": {"b": x}}, lambda r: r["a.b"].t - r["a"]["b"]),
    "one tensor twice": (lambda x: (y := x * 2, [y]), lambda r: r[0] + r[1][0]),
    "several dtypes": (lambda x: (x > 0, x.long()), lambda r: r[0].float() + r[1]),
    "transposed": (lambda x: (x * 2).T, lambda r: r.T),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_gap_outputs_of_every_kind_are_written_back(device: Device, kind: str) -> None:
    make, use = KINDS[kind]
    gap = graph_break(make)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = use(gap(batch["x"] + 1)) * 2
        return result

    runner = broken(body, device)
    assert num_graphs(runner) == 2
    for seed in range(3):
        x = rows(device, 4, seed)
        equal(runner.run({"x": x}), use(make(x + 1)) * 2)


@graph_break
def read(box: Any) -> torch.Tensor:
    result: torch.Tensor = box.t * box.scale
    return result


def agree(body: Any, device: Device) -> Runner:
    runner = broken(body, device)
    for seed, count in enumerate((3, 8, 2)):
        x = rows(device, count, seed)
        equal(runner.run({"x": x}), body({"x": x}))
    assert runner.stats.replays.total() == 3
    return runner


@pytest.mark.parametrize("make", [Box, lambda t: SimpleNamespace(t=t, scale=1.0)])
def test_an_object_that_the_body_makes_is_seen_as_it_was_at_the_call(device: Device, make: Any) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        box = make(batch["x"] * 2)
        first = read(box)
        box.t, box.scale = batch["x"] * 5, 3.0
        return first - read([box][0])

    agree(body, device)


def test_an_object_from_outside_is_live_in_a_gap(device: Device) -> None:
    box = Box(torch.full((1,), 5.0, device=device.torch_device), 2.0)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        return batch["x"] + read(box)

    runner = agree(body, device)
    box.scale = 7.0
    x = rows(device, 3)
    equal(runner.run({"x": x}), x + 35)


def test_an_object_from_outside_that_the_body_fills_is_refused_by_name(device: Device) -> None:
    """A replay runs no Python: it would leave in the object what the capture put there."""
    box = Box(torch.zeros(1), 2.0)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        box.t = batch["x"] * 2
        return read(box)

    runner = broken(body, device)
    x = rows(device, 3)
    equal(runner.run({"x": x}), x * 4)
    assert runner.report is not None
    assert "changes Box.t in every run" in str(runner.report.failures[0].error)


@pytest.mark.slow
def test_an_argument_that_a_gap_changes_is_whole_again_at_the_next_replay(device: Device) -> None:
    @graph_break
    def take(parts: list[torch.Tensor], names: dict[str, int]) -> torch.Tensor:
        names["called"] = names.get("called", 0) + 1
        return parts.pop() * names["called"]

    agree(lambda batch: take([batch["x"], batch["x"] * 2], {}) + 1, device)


def test_an_object_that_holds_itself_is_passed_as_it_is(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        box: Any = Box(batch["x"] * 2)
        box.owner = SimpleNamespace(box=box)
        return read(box)

    agree(body, device)


@pytest.mark.parametrize("wrap", [iter, deque, lambda parts: {*parts}])
def test_an_argument_that_no_replay_can_fill_is_refused(device: Device, wrap: Any) -> None:
    @graph_break
    def total(parts: Any) -> torch.Tensor:
        return torch.stack(list(parts)).sum(0)

    runner = broken(lambda batch: total(wrap([batch["x"]])), device)
    assert runner.report is not None
    assert "Pass a list or tuple" in str(runner.report.failures[0].error)


@pytest.mark.parametrize("wrap", [iter, deque])
def test_a_result_that_the_next_graph_could_not_read_is_refused(device: Device, wrap: Any) -> None:
    gap = graph_break(lambda x: wrap([x * 2]))
    runner = broken(lambda batch: next(iter(gap(batch["x"]))), device)
    assert runner.report is not None
    assert "Return tensors in a tuple, list, dict" in str(runner.report.failures[0].error)


def test_two_tensors_where_one_stood_twice_are_refused(device: Device) -> None:
    twice = True

    @graph_break
    def gap(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, (y if twice else x * 3)

    runner = broken(lambda batch: sum(gap(batch["x"])), device)
    twice = False
    with pytest.raises(BreakError, match="two tensors where it returned one tensor twice"):
        runner.run({"x": rows(device, 4)})


def test_gap_outputs_lie_in_pool_memory(device: Device) -> None:
    """Held outside, they would add up over all buckets and layers."""
    seen = Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        out = negate(batch["x"] + 1)
        if current().stage is Stage.CAPTURING:
            seen(device.weak(out))
        return out * 2

    runner = broken(body, device, sizes=(4,))
    assert runner.memory.owns(seen.call_args.args[0])


def test_a_gap_may_write_its_argument_in_place(device: Device) -> None:
    @graph_break
    def attend(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(q * 5)
        return out

    def body(batch: dict[str, Any]) -> torch.Tensor:
        q = batch["x"] + 1
        return attend(q, torch.empty_like(q)) - 1

    x = rows(device, 3)
    equal(broken(body, device).run({"x": x}), (x + 1) * 5 - 1)


def test_a_gap_without_a_result_acts_by_its_side_effects(device: Device) -> None:
    store = torch.zeros(8, WIDTH, device=device.torch_device)

    @graph_break
    def keep(x: torch.Tensor) -> None:
        store[: x.shape[0]] = x

    def body(batch: dict[str, Any]) -> torch.Tensor:
        y = batch["x"] * 2
        keep(y)
        return y + 1

    runner = broken(body, device)
    assert not store.any(), "trial runs are undone"
    x = rows(device, 4)
    equal(runner.run({"x": x}), x * 2 + 1)
    equal(store[:4], x * 2)


def test_a_gap_sees_the_live_batch_and_reads_from_the_host(device: Device) -> None:
    @graph_break
    def scale(x: torch.Tensor) -> torch.Tensor:
        live = current().batch
        return x * (live["x"].shape[0] + float(live["x"].sum().item() * 0) + live["factor"])

    def sample(extent: Any, seed: int) -> dict[str, Any]:
        return {"x": torch.ones(extent.used["seqs"], WIDTH, device=device.torch_device), "factor": 0}

    runner = broken(lambda batch: scale(batch["x"]), device, sample=sample)
    x = rows(device, 3)
    equal(runner.run({"x": x, "factor": 10}), x * 13)
    equal(runner.run({"x": x[:2], "factor": 20}), x[:2] * 22)
    assert runner.stats.replays.total() == 2


def test_a_gap_that_changes_its_shape_raises_and_leaves_the_runner_usable(device: Device) -> None:
    shrink = False

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        return x[:1] if shrink else x * 2

    runner = broken(lambda batch: gap(batch["x"]) + 1, device)
    shrink = True
    with pytest.raises(BreakError, match=r"gap .*gap.*\[1, 4\].*\[4, 4\]"):
        runner.run({"x": rows(device, 4)})
    shrink = False
    equal(runner.run({"x": rows(device, 4)}), rows(device, 4) * 2 + 1)


def test_a_gap_that_changes_its_structure_or_a_plain_value_raises(device: Device) -> None:
    value: Any = 1

    @graph_break
    def gap(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return x, value

    def body(batch: dict[str, Any]) -> torch.Tensor:
        x, factor = gap(batch["x"])
        return x * factor

    runner = broken(body, device)
    value = 2
    with pytest.raises(BreakError, match="returned 2, at capture 1"):
        runner.run({"x": rows(device, 4)})
    value = (1, 2)
    with pytest.raises(BreakError, match="same structure"):
        runner.run({"x": rows(device, 4)})


def test_an_exception_in_a_gap_surfaces_as_itself(device: Device) -> None:
    fails = False

    class BrokenError(Exception):
        pass

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise BrokenError("no")
        return x * 2

    runner = broken(lambda batch: gap(batch["x"]), device)
    fails = True
    with pytest.raises(BrokenError):
        runner.run({"x": rows(device, 3)})
    assert current().phase is None
    fails = False
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * 2)


@pytest.mark.parametrize("options", [RunnerOptions(), RunnerOptions(debug=True)])
def test_a_gap_inside_a_gap_is_not_said_to_be_recorded(
    device: Device, options: RunnerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    outer = graph_break(lambda x: negate(x) * 2)
    with caplog.at_level(logging.WARNING, logger="phonograph"):
        make_runner(lambda batch: outer(batch["x"]) + 1, device, backend="breakable", options=options)
        assert not caplog.records
        make_runner(lambda batch: outer(batch["x"]) + 1, device, backend="full")
    assert "is marked @graph_break, but this recording has no breaks" in caplog.text


def test_nested_breaks_are_one_gap(device: Device) -> None:
    @graph_break
    def outer(x: torch.Tensor) -> torch.Tensor:
        break_graph()
        return negate(x) * 2

    runner = broken(lambda batch: outer(batch["x"]) + 1, device)
    assert num_graphs(runner) == 2
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * -2 + 1)


def test_a_gap_may_call_another_runner(device: Device) -> None:
    inner = make_runner(lambda batch: batch["x"] * 3, device, name="draft")

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inner.run({"x": x})
        return result

    runner = broken(lambda batch: gap(batch["x"] + 1) + 1, device)
    inner.stats.clear()
    equal(runner.run({"x": rows(device, 4)}), (rows(device, 4) + 1) * 3 + 1)
    assert inner.stats.replays.total() == 1


def test_disabled_at_the_definition_and_at_one_call_site(device: Device) -> None:
    off = graph_break(enabled=False)(lambda x: -x)
    runner = broken(lambda batch: off(batch["x"]) + negate.inline(batch["x"]) + negate(batch["x"]), device)
    assert num_graphs(runner) == 2
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * -3)


def test_methods_break_and_can_be_inlined(device: Device) -> None:
    class Layer:
        factor = 3.0

        @graph_break
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            """Docs stay."""
            return x * self.factor

    layer = Layer()
    runner = broken(lambda batch: layer.attend(batch["x"]) + layer.attend.inline(batch["x"]), device)
    assert num_graphs(runner) == 2
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * 6)
    assert Layer.attend.__doc__ == "Docs stay."


def test_outside_capture_the_decorator_is_just_the_call() -> None:
    calls: list[tuple[int, int]] = []

    @graph_break
    def add(left: int, right: int = 2) -> int:
        calls.append((left, right))
        return left + right

    assert add(1) == 3
    assert add(1, right=5) == 6
    assert calls == [(1, 2), (1, 5)]
    break_graph()


def test_host_reads_between_gaps_are_still_refused(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        y = negate(batch["x"])
        return y * y.sum().item()

    runner = broken(body, device)
    assert runner.report is not None
    assert len(runner.report.failures) == 3
    error = runner.report.failures[0].error
    assert error is not None
    assert "reads the device from the host" in str(error)
    equal(runner.run({"x": rows(device, 3)}), body({"x": rows(device, 3)}))


def test_a_break_that_only_capture_reaches_fails_that_bucket_with_its_reason(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        x: torch.Tensor = batch["x"]
        return negate(x) if current().stage is Stage.CAPTURING else x

    runner = broken(body, device)
    assert runner.report is not None
    assert "warm-up of this shape did not" in str(runner.report.failures[0].error)


def test_segments_of_one_recording_do_not_poison_each_other() -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        early = batch["x"] * 7
        late = negate(batch["x"])
        break_graph()
        return early + late

    device = EmulatedDevice(poison=True)
    runner = broken(body, device)
    for count in (2, 8, 4, 8):
        equal(runner.run({"x": rows(device, count)}), rows(device, count) * 6)
