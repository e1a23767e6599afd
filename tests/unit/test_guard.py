"""The guard: what a recording would freeze is named by op, argument and line; correct bodies raise no alarm."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from phonograph import Axis, CaptureError, Device, Dim, Extent, Pad, Reason, RunnerOptions, Slot, graph_break, graphed
from phonograph.devices.nodes import Node, NodeList, node_difference, nodes_of
from phonograph.errors import DeclarationError, HostConstantError
from phonograph.graphs.progress import silent
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.guard import _Runs, guard, traced
from runners import WIDTH, make_runner, rows

pytestmark = pytest.mark.slow

Body = Callable[[dict[str, Any]], Any]
WEIGHTS = [torch.full((WIDTH,), 1.0), torch.full((WIDTH,), 2.0)]


@pytest.fixture(autouse=True)
def _own_tensors(request: pytest.FixtureRequest) -> None:
    """What bodies read besides their batch lies on the device of the test."""
    TABLES.clear()
    if "device" in request.fixturenames:
        on = request.getfixturevalue("device").torch_device
        WEIGHTS[:] = [weight.to(on) for weight in WEIGHTS]


def told_apart(one: NodeList, other: NodeList) -> str:
    found = node_difference(one, other)
    return found.problem if found is not None else ""


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    """Rows, and beside them numbers that change from batch to batch: no slots."""
    numbers = torch.Generator().manual_seed(seed)
    used = extent.used["seqs"]
    lens = torch.randint(1, 32, (used,), generator=numbers)
    return {
        "x": torch.randn(used, WIDTH, generator=numbers),
        "n": used,
        "max_seqlen": int(lens.max()),
        "lens": lens.tolist(),
        "scale": 1 / (1 + seed),
        "mask": torch.ones(WIDTH),
        "flag": bool(seed % 2),
    }


def captured(body: Body, device: Device, **options: Any) -> Runner:
    def drawn(extent: Extent, seed: int) -> dict[str, Any]:
        found = sample(extent, seed)
        return found | {name: found[name].to(device.torch_device) for name in ("x", "mask")}

    return make_runner(body, device, sample=drawn, sizes=(4, 8), **options)


def error_of(runner: Runner) -> CaptureError:
    assert runner.report is not None
    errors = [row.error for row in runner.report.failures if row.error is not None]
    assert len(errors) == len(runner.report.rows), runner.report
    return errors[0]


def sliced(batch: dict[str, Any]) -> Any:
    return (batch["x"][: batch["n"]] * 2).sum()  # wrong


def longest(batch: dict[str, Any]) -> Any:
    places = torch.arange(batch["max_seqlen"])  # wrong
    return batch["x"] + places.sum()


def scaled(batch: dict[str, Any]) -> Any:
    return batch["x"] * batch["scale"]  # wrong


def filled(batch: dict[str, Any]) -> Any:
    y = batch["x"].clone()
    y[:, 0].fill_(batch["scale"])  # wrong
    return y


def full(batch: dict[str, Any]) -> Any:
    return batch["x"] + torch.full((WIDTH,), batch["scale"], device=batch["x"].device)  # wrong


def constant(batch: dict[str, Any]) -> Any:
    return batch["x"] * torch.tensor(batch["scale"])  # wrong


def branch(batch: dict[str, Any]) -> Any:
    y = batch["x"] * 2
    if batch["flag"]:
        y = y.relu()  # wrong
    return y + 1


def loop(batch: dict[str, Any]) -> Any:
    y = batch["x"]
    for _ in range(batch["lens"][0]):
        y = y + 1  # wrong
    return y


def other_weight(batch: dict[str, Any]) -> Any:
    return batch["x"] * WEIGHTS[batch["flag"]]  # wrong


def own_mask(batch: dict[str, Any]) -> Any:
    return batch["x"] * batch["mask"]  # wrong


def own_swap(batch: dict[str, Any]) -> Any:
    one, other = batch["x"] + 1, batch["x"] + 2
    return (other if batch["flag"] else one).relu()  # wrong


def padded_by_flag(batch: dict[str, Any]) -> Any:
    return torch.nn.functional.pad(batch["x"], (0, int(batch["flag"])))  # wrong


def clocked(batch: dict[str, Any]) -> Any:
    return batch["x"] * time.perf_counter()  # wrong


TABLES: dict[int, torch.Tensor] = {}


def cached_by_value(batch: dict[str, Any]) -> Any:
    length = batch["max_seqlen"]
    if length not in TABLES:
        TABLES[length] = torch.full((WIDTH,), 2.0, device=batch["x"].device) * length  # wrong
    return batch["x"] + TABLES[length]


FAULTS: dict[Body, str] = {
    sliced: "end=) gets 8 with one sample and 5 with another",
    longest: "aten.arange(end=) gets",
    scaled: "aten.mul.Tensor(other=) gets 1.0 with one sample and 0.5 with another",
    filled: "aten.fill_.Scalar(value=) gets 1.0",
    full: "aten.full(fill_value=) gets 1.0",
    constant: "gets 1.0 with one sample and 0.5 with another",
    branch: "one runs aten.add.Tensor",
    loop: "the body goes another way with another sample",
    other_weight: "reads WEIGHTS.0 with one sample and WEIGHTS.1 with another",
    own_mask: "reads the batch.mask, which is another tensor in every run",
    own_swap: "that the body made with one sample",
    padded_by_flag: "aten.constant_pad_nd(pad=) gets 0 with one sample and 1 with another",
    clocked: "aten.mul.Tensor(other=) gets",
    cached_by_value: "the body goes another way with another sample",
}


def marked_line(function: Callable[..., Any]) -> int:
    source, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(source) if "# wrong" in line)


@pytest.mark.parametrize("body", FAULTS, ids=lambda body: body.__name__)
def test_a_value_of_the_host_is_named_by_op_line_and_both_values(body: Body, device: Device) -> None:
    error = error_of(captured(body, device))
    assert isinstance(error, HostConstantError)
    assert FAULTS[body] in str(error)
    assert "slot" in error.remedy
    assert error.frame is not None
    assert error.frame.file == __file__
    lines = {error.frame.line} | {int(part.split(",")[0]) for part in str(error).split("test_guard.py:")[1:]}
    assert marked_line(body) in lines


def test_the_wrong_recording_is_wrong_without_the_guard(device: Device) -> None:
    """Else the tests above would show nothing; a runner that compares the field does not serve it, either."""
    x, options = rows(device, 8), RunnerOptions(guard="off")
    trusting, comparing = (
        captured(scaled, device, options=options, free=("scale",)),
        captured(scaled, device, options=options),
    )
    assert not torch.equal(trusting.run({"x": x, "scale": 0.25}), x * 0.25)
    assert torch.equal(comparing.run({"x": x, "scale": 0.25}), x * 0.25)
    assert comparing.stats.eager[Reason.STALE] == 1


def test_what_is_refused_runs_eagerly_and_right(device: Device) -> None:
    runner, x = captured(scaled, device), rows(device, 8)
    assert torch.equal(runner.run({"x": x, "scale": 0.25}), x * 0.25)
    assert runner.stats.eager.total() == 1


def test_reported_it_is_recorded_all_the_same(device: Device) -> None:
    runner = captured(scaled, device, options=RunnerOptions(guard="report"))
    assert runner.report is not None
    assert len(runner.captured) == 2
    assert [finding.key.size for finding in runner.report.reported] == [8, 4]
    assert "recorded all the same: decode[seqs=8]: aten.mul" in str(runner.report)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(DeclarationError, match="expected one of refuse, report, off"):
        RunnerOptions(guard="warn")  # type: ignore[arg-type]


def test_what_the_ends_show_holds_for_the_sizes_between(device: Device) -> None:
    def body(batch: dict[str, Any]) -> Any:
        return batch["x"] * batch["scale"] if batch["x"].shape[0] == 2 else batch["x"] * 2

    options = RunnerOptions(guarded="ends")
    runner = make_runner(body, device, sample=sample, sizes=(2, 4, 8), options=options)
    assert not runner.captured


def test_a_product_is_guarded_by_itself(device: Device) -> None:
    def body(batch: dict[str, Any]) -> Any:
        return batch["x"] * (batch["scale"] if batch["kind"] == "scaled" else 2)

    def of(batch: dict[str, Any]) -> str:
        return str(batch["kind"])

    axis = Axis("kind", ("plain", "scaled"), of=of, apply=lambda batch, value: {**batch, "kind": value})
    runner = make_runner(
        body, device, sample=lambda extent, seed: {**sample(extent, seed), "kind": "plain"}, axes=[axis], sizes=(4, 8)
    )
    assert {key.axes for key in runner.captured} == {""}


def test_an_axis_that_is_declared_is_no_difference(device: Device) -> None:
    def body(batch: dict[str, Any]) -> Any:
        return batch["x"].relu() if batch["kind"] == "relu" else batch["x"] * 2

    axis = Axis("kind", ("plain", "relu"), of=lambda b: b["kind"], apply=lambda b, value: {**b, "kind": value})
    runner = make_runner(
        body, device, sample=lambda extent, seed: {**sample(extent, seed), "kind": "plain"}, axes=[axis], sizes=(4, 8)
    )
    assert len(runner.captured) == 4


# -- gaps -------------------------------------------------------------------------------------------------------


def test_a_number_that_a_gap_is_passed_is_frozen_too(device: Device) -> None:
    @graph_break
    def attend(x: torch.Tensor, length: int) -> torch.Tensor:
        return x * length

    error = error_of(captured(lambda batch: attend(batch["x"] + 1, batch["max_seqlen"]), device, backend="breakable"))
    assert "gap" in error.op
    assert "(length=) gets" in str(error)


def test_what_a_gap_does_differs_freely(device: Device) -> None:
    lengths = iter(range(1000))

    @graph_break
    def attend(x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(lengths, 0) % 3):
            x = x + 1 - 1
        return x * 1.0

    body: Body = lambda batch: attend(batch["x"] + 1) * 2  # noqa: E731
    runner = captured(body, device, backend="breakable", preserve=lambda batch: _nothing())
    assert len(runner.captured) == 2


class _nothing:  # noqa: N801 - used as a function
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


# -- correct, if unusual ----------------------------------------------------------------------------------------


@functools.cache
def table(length: int, on: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32, device=on)


def memoised(batch: dict[str, Any]) -> Any:
    return batch["x"] + table(WIDTH, batch["x"].device)


def random_rows(batch: dict[str, Any]) -> Any:
    return batch["x"] + torch.rand_like(batch["x"]) + torch.nn.functional.dropout(batch["x"], 0.5)


def on_device(batch: dict[str, Any]) -> Any:
    return torch.where(batch["x"].sum(-1, keepdim=True) > 0, batch["x"] * 2, batch["x"].relu())


def of_padded_size(batch: dict[str, Any]) -> Any:
    count, on = batch["x"].shape[0], batch["x"].device
    return batch["x"] * torch.full((), 1 / count, device=on) + torch.arange(count, device=on)[:, None]


def constants(batch: dict[str, Any]) -> Any:
    return batch["x"] * torch.tensor(2.0) + torch.tensor(float("nan")).isnan() + float("inf") * 0.0


def unused_numbers(batch: dict[str, Any]) -> Any:
    assert batch["max_seqlen"] > 0
    return batch["x"] * len(WEIGHTS)


def by_vmap(batch: dict[str, Any]) -> Any:
    return torch.func.vmap(lambda row: row * row.sum())(batch["x"])


def other_line_same_op(batch: dict[str, Any]) -> Any:
    if batch["flag"]:
        return batch["x"] * 2
    return batch["x"] * 2


def in_place_forms(batch: dict[str, Any]) -> Any:
    y = batch["x"].clone()
    y.unsqueeze_(0).squeeze_(0)
    return y.t_().t_()


CORRECT = [
    memoised, random_rows, on_device, of_padded_size, constants, unused_numbers, by_vmap, other_line_same_op,
    in_place_forms,
]  # fmt: skip


@pytest.mark.parametrize("body", CORRECT, ids=lambda body: body.__name__)
@pytest.mark.parametrize("inference", [False, True])
def test_correct_bodies_raise_no_alarm(body: Body, inference: bool, device: Device) -> None:
    with torch.inference_mode(inference):
        runner = captured(body, device)
    assert runner.report is not None
    assert not runner.report.failures, str(runner.report)


def test_a_size_that_a_field_carries_is_the_padded_one(device: Device) -> None:
    runner = captured(lambda batch: batch["x"][: batch["n"]] * 2, device, dims=[Dim("seqs", field="n")])
    assert len(runner.captured) == 2


def test_arguments_that_graphed_compares_may_be_frozen() -> None:
    """A call with another value is eager, so a recording with one value is right."""

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return x[:n] * 2

    def full_sample(extent: Extent, seed: int) -> dict[str, Any]:
        used = extent.used["seqs"]
        return {"x": torch.randn(used, WIDTH, generator=torch.Generator().manual_seed(seed)), "n": used}

    made = graphed(
        step, slots=[Slot("x", ("seqs", WIDTH), torch.float32)], bucketed="seqs", buckets=[4], sample=full_sample,
        device="emulated",
    )  # fmt: skip
    made.capture(silent)
    assert len(made.runner.captured) == 1
    x = torch.randn(3, WIDTH)
    assert torch.equal(made(x, n=2), x[:2] * 2)
    assert made.stats.eager.total() == 1


def test_a_sample_that_cannot_be_smaller_is_compared_at_its_full_size(device: Device) -> None:
    def rigid(extent: Extent, seed: int) -> dict[str, Any]:
        if extent.used["seqs"] not in (1, 2, 4, 8):
            raise ValueError("only powers of two")
        return sample(extent, seed)

    assert len(make_runner(lambda batch: batch["x"] * 2, device, sample=rigid, sizes=(4, 8)).captured) == 2
    assert not make_runner(scaled, device, sample=rigid, sizes=(4, 8)).captured


# -- on demand --------------------------------------------------------------------------------------------------


def test_on_demand_it_finds_the_same_and_leaves_state_alone(device: Device) -> None:
    state = torch.zeros(WIDTH, device=device.torch_device)

    def body(batch: dict[str, Any]) -> Any:
        state.add_(1)
        return batch["x"] * batch["scale"] + state

    runner = captured(body, device, options=RunnerOptions(guard="off"))
    report = guard(runner)
    assert not report.ok
    assert [finding.key.size for finding in report.findings] == [8, 4]
    assert "aten.mul.Tensor(other=) gets 1.0" in str(report)
    assert not state.any()
    assert guard(captured(memoised, device)).ok


def test_a_check_that_raises_is_that_checks_failure(device: Device) -> None:
    runs = [0]

    def body(batch: dict[str, Any]) -> Any:
        if runs[0] and batch["x"].shape[0] == 8:
            raise ZeroDivisionError("planted")
        return batch["x"] * 2

    runner = captured(body, device)
    runs[0] = 1
    report = guard(runner)
    assert report.failures == ("decode[seqs=8]: ZeroDivisionError: planted",)


def test_a_trace_shows_ops_lines_and_the_memory_they_read_by_name(device: Device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)).to(device.torch_device)

    def body(batch: dict[str, Any]) -> Any:
        return model(batch["x"])  # wrong

    runner = make_runner(body, device, sizes=(4,))
    head, *ops = str(traced(runner, runner.captured[0])).splitlines()
    assert head == "decode[seqs=4]: 2 ops"
    assert all(f"test_guard.py:{marked_line(body)}, in body" in op for op in ops)
    assert ops[0].endswith("reads model.0.weight")
    assert ops[1].endswith("reads model.0.bias, slot x")


def test_integer_slots_and_host_slots_are_no_difference(device: Device) -> None:
    slots = [
        Slot("x", ("seqs", WIDTH), torch.float32),
        Slot("lens", ("seqs",), torch.int64, pad=Pad.fill(1), valid=(1, 31)),
    ]

    def drawn(extent: Extent, seed: int) -> dict[str, Any]:
        found = sample(extent, seed)
        return {"x": found["x"], "lens": np.asarray(found["lens"])}

    runner = make_runner(
        lambda batch: batch["x"] * batch["lens"][:, None], device, sample=drawn, sizes=(4, 8), slots=slots
    )
    assert len(runner.captured) == 2


# -- nodes ------------------------------------------------------------------------------------------------------


def test_the_nodes_of_two_captures_agree_unless_a_number_is_frozen(device: Device) -> None:
    """Ops are not compared here: the tapes alone must show it."""
    is_emulated = device.torch_device.type == "cpu"
    bodies = [memoised, random_rows, on_device, constants, branch, scaled, constant, longest]
    # On a GPU the addresses that torch's kernels get are in structs, which are left out: ops show them.
    for body in [*bodies, own_mask] if is_emulated else bodies:
        runner = captured(body, device, options=RunnerOptions(guard="off"))
        runs = _Runs(runner)
        with torch.no_grad(), runs.restored():
            difference, unseen = runs.node_difference(runner.captured[0])
        assert (difference is not None) == (body in FAULTS), (body, difference, unseen)
        # Kernels of a GPU have bytes that nobody sets, and that may differ from capture to capture.
        assert unseen == () if is_emulated else not any("nodes unseen" in text for text in unseen), unseen


def test_nodes_of_graphs_between_gaps_agree_too(device: Device) -> None:
    @graph_break
    def attend(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def body(batch: dict[str, Any]) -> Any:
        before = batch["x"] + 1
        return attend(before) * 2 + before

    report = guard(captured(body, device, backend="breakable"), nodes=True)
    assert report.ok, str(report)


def test_a_guard_with_nodes_leaves_no_graph_behind(device: Device) -> None:
    runner = captured(memoised, device)
    before = device.memory().used if device.torch_device.type == "cpu" else None
    report = guard(runner, nodes=True)
    assert report.ok, str(report)
    assert before is None or device.memory().used == before


def test_a_node_is_compared_by_name_launch_and_arguments() -> None:
    one = Node("kernel", "gemm", (8, 1, 1), (("parameter 0", "block 0 + 16"), ("parameter 1", 8)))
    for other, told in (
        (Node("memset", ""), "node 0 (kernel gemm) is memset"),
        (Node("kernel", "gemm", (4, 1, 1), one.arguments), "is launched with (8, 1, 1) for one sample and (4, 1, 1)"),
        (Node("kernel", "gemm", (8, 1, 1), (one.arguments[0], ("parameter 1", 5))), "parameter 1: gets 8 with one"),
    ):
        assert told in told_apart(NodeList((one,)), NodeList((other,)))
    assert told_apart(NodeList((one,)), NodeList((one,))) == ""
    assert told_apart(NodeList((one,)), NodeList(())) == "one sample gives 1 nodes, another 0"


def test_nodes_that_cannot_be_read_are_unseen_with_the_reason() -> None:
    class Silent:
        def replay(self) -> None: ...

        def release(self) -> None: ...

    class Failing(Silent):
        def nodes(self) -> NodeList:
            raise OSError("libcuda.so.1: cannot open shared object file")

    assert nodes_of(Silent()).unseen == ("nodes unseen: Silent has no nodes()",)
    assert "nodes unseen: OSError: libcuda.so.1" in nodes_of(Failing()).unseen[0]
