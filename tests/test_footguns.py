"""The traps of device graphs, and what phonograph does about each: a table, and one test per row."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from phonograph import (
    BreakError,
    Buckets,
    CaptureError,
    CoverageError,
    DataDependentShapeError,
    Device,
    Extent,
    Graphed,
    HostConstantError,
    HostReadError,
    InputWriteError,
    LoadError,
    Pad,
    PhonographError,
    Reason,
    Replay,
    RunEagerly,
    Slot,
    current,
    graph_break,
    graphed,
)
from phonograph.devices.emulated import EmulatedDevice
from phonograph.graphs.inputs.extent import Dim
from phonograph.graphs.progress import silent

# fmt: off
TRAPS = [
    # test, trap, what phonograph does
    ("host_read", "the body reads a tensor on the host (item, float, tolist, print)",
     "refused before capture, op and line named; those calls run eagerly, counted"),
    ("branch_on_a_tensor", "Python branches on a tensor's value, and capture keeps one side",
     "refused before capture, op and line named"),
    ("data_dependent_shape", "a shape depends on values (nonzero, mask indexing)",
     "refused before capture, op and line named"),
    ("host_constant", "a tensor is made from host values inside the body, and frozen",
     "refused before capture, op and line named"),
    ("number_accumulated_into", "a tensor that the body makes of a number is written in place, and keeps what it gets",
     "holds the number again at every replay"),
    ("memory_without_memory", "torch.func.jvp makes zeros that have no memory",
     "refused, op and line named, where the op would be recorded"),
    ("python_number", "a Python number that changes between calls is frozen at capture",
     "the call is eager and counted as stale, by name; make it a slot, and it is live"),
    ("side_effect", "Python side effects run at capture only",
     "refused at capture, value and line named, and put back; in a gap they run at every call"),
    ("an_argument_that_is_no_slot", "an argument that is no slot changes between calls",
     "never ignored in silence: its value counts, or the call is refused"),
    ("number_returned", "the body returns a Python number, which every replay would repeat",
     "refused at capture; those calls run eagerly"),
    ("stale_padded_rows", "padded rows still hold the last batch",
     "every load writes the whole tail"),
    ("stale_optional_input", "an absent input still holds yesterday's mask",
     "the buffer is reset to its neutral value"),
    ("padding_leaks_across_rows", "an op mixes rows, so padding changes real ones",
     "verify fails the check `unpadded`"),
    ("false_unread_claim", "a slot claims that nothing reads its padding, and something does",
     "verify poisons the tail and fails the check `poison`"),
    ("memory_left_by_others", "the body reads memory before it writes it, and finds another recording's",
     "verify poisons the pool and fails the check `poison`"),
    ("too_large", "a batch is larger than the largest bucket",
     "eager, counted; an error when strict"),
    ("open_top", "the largest bucket is below the limit: 97 requests crash a limit of 100",
     "buckets up to 100 end with 100"),
    ("over_padding", "a small batch in a huge bucket costs more than eager",
     "eager, counted, past 2x and 256 rows"),
    ("zero_rows", "an idle step has no rows",
     "replays the smallest bucket, gives no rows"),
    ("two_dims_of_one_size", "two dims have one size in every recording: which of them does an output's axis follow?",
     "each is tried alone at other sizes, before capture and by verify"),
    ("an_axis_cut_at_a_length", "an output's axis follows a dim only up to a length: small batches are trimmed wrong",
     "tried at small sizes too, and refused at capture, axis and sizes named"),
    ("one_size_only", "the body runs at one size of a dim only: how to trim its outputs is not known",
     "batches that don't fill the dim run eagerly, counted"),
    ("outputs_overwritten", "the next replay overwrites the tensors that the last one returned",
     "calls own their outputs; views are asked for by name"),
    ("input_returned", "the body returns its input, that is, the buffer",
     "the caller gets a copy, on both paths"),
    ("callers_tensor_written", "the body writes to its input in place: a replay would write the buffer",
     "refused at capture, op and line named; an eager call writes the caller's tensor"),
    ("one_tensor_for_two_slots", "two slots are given the same tensor, and the body writes one of them",
     "a recorded body writes none; an eager call has the caller's tensors, or is refused if copies were asked for"),
    ("memo_by_identity", "the body remembers what it made of an input by `is`, `id()` or a cache over tensors",
     "trial runs get new tensor objects every time: refused by name, or computed in the recording"),
    ("input_kept", "the body keeps its input for the next call, and the eager path's buffer is overwritten",
     "an eager call has the caller's own tensors, or ones made for it alone"),
    ("weight_changed_in_place", "a weight is updated in place",
     "seen by the next replay"),
    ("weight_replaced", "a parameter is replaced, and the graph reads the old address",
     "the call is eager and counted as stale, by name; refresh() takes the new one"),
    ("state_written_at_capture", "warm-up and capture advance a counter or a cache",
     "what the body writes is put back"),
    ("random_numbers", "a replay repeats the random numbers of capture",
     "every replay draws its own, and a seed fixes them"),
    ("seed_in_the_body", "the body seeds (manual_seed, fork_rng, set_rng_state), which a replay does not",
     "refused before capture, function and line named"),
    ("weight_caches", "capture inside torch.autocast or parametrize.cached() reads what they made of a weight before",
     "trial runs and capture find these caches empty, and leave nothing in them"),
    ("grad_enabled", "capture or call with grad enabled, on weights that need gradients",
     "recorded and replayed without grad"),
    ("inference_mode", "capture under inference mode, calls outside it, and the other way round",
     "same results; no buffer is an inference tensor"),
    ("gap_exception", "a gap raises at replay",
     "surfaces as itself; the next call is right"),
    ("gap_shape_changes", "a gap returns another shape than at capture",
     "BreakError names gap, found and expected"),
    ("gap_value_changes", "a gap returns a Python value that the next graph has frozen in",
     "BreakError names both values"),
    ("gap_arguments", "a gap's Python arguments keep the value of capture",
     "a live argument has the value of the call, and the live batch is in current().batch"),
    ("gap_returns_its_argument", "a gap returns its argument at capture, and a new tensor later: where does that go?",
     "BreakError names the gap and the remedy; the argument is never written"),
    ("gap_closure", "a gap reads a variable around it that the body changes later, such as that of a loop",
     "refused at capture, variable and line named"),
    ("gap_result_written", "the body writes in place to what a gap returned, and others hold that memory too",
     "refused at capture, gap named; memory that is the gap's own may be written"),
    ("gap_changes_a_container", "a gap puts something into a dict or list that it is passed: a replay has a copy",
     "refused at capture, gap named"),
    ("gap_modes", "a gap is called under an autocast or a default dtype that the body sets",
     "runs under it at every replay"),
    ("one_failing_bucket", "one shape can't be captured",
     "that bucket stays eager, the others are served by graphs"),
    ("failed_capture", "a failed capture leaves the device or torch broken",
     "unwound: torch, random numbers and the next capture work"),
    ("failing_gap_in_inference_mode", "a gap raises while the body is in inference mode",
     "unwound just the same"),
    ("garbage_collection", "a collection during capture frees device memory",
     "the collector is off during capture, and as found after it"),
    ("memory_after_release", "released graphs keep the model's memory",
     "nothing of the body is held after release"),
    ("integer_overflow", "a value does not fit the slot's narrower integer type",
     "refused at load, for values that the host holds"),
    ("float_into_integers", "floats are loaded into an integer slot and cut off",
     "refused at load"),
    ("wrong_shape", "an input broadcasts into a buffer of another shape",
     "refused at load"),
]
# fmt: on

WIDTH = 3
X = Slot("x", ("rows", WIDTH), torch.float32)


def make(
    function: Callable[..., Any],
    device: Device,
    *,
    slots: Sequence[Slot] = (X,),
    buckets: Buckets = Buckets.of(2, 4, 8),
    capture: bool = True,
    **options: Any,
) -> Graphed:
    made = graphed(function, slots=slots, bucketed="rows", buckets=buckets, device=device, **options)
    if capture:
        made.capture(silent)
    return made


def rows(device: Device, count: int, seed: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=random).to(device.torch_device)


def check_replayed(made: Graphed, device: Device, expected: Callable[..., torch.Tensor]) -> None:
    """Batches of every size that has a bucket are served by graphs, and right."""
    assert made.runner.buckets is not None
    for count in range(1, made.runner.buckets.largest + 1):
        x = rows(device, count, seed=count)
        assert isinstance(made.decide(x), Replay)
        torch.testing.assert_close(made(x), expected(x))


def check_refused(made: Graphed, device: Device, kind: type[CaptureError]) -> CaptureError:
    """Every bucket was refused for this reason; calls run eagerly, right, and counted."""
    report = made.runner.report
    assert report is not None
    assert len(report.failures) == len(report.rows) == 3
    error = report.failures[0].error
    assert type(error) is kind
    assert str(error).startswith("capturing ")
    x = rows(device, 3)
    assert torch.equal(made(x), made.__wrapped__(x))  # type: ignore[attr-defined]
    assert made.stats.eager == {Reason.CAPTURE_FAILED: 1}
    return error


def check_frame(error: CaptureError, function: Callable[..., Any]) -> None:
    assert error.frame is not None
    assert (error.frame.file, error.frame.function) == (__file__, function.__name__)
    assert error.op


def test_every_row_has_its_test() -> None:
    names = [name for name, _, _ in TRAPS]
    assert len(set(names)) == len(names)
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert tests == {*names, "every_row_has_its_test"}


# -- what a graph can't hold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [torch.Tensor.item, float, torch.Tensor.tolist, lambda t: float(f"{t:.6f}")])
def test_host_read(device: Device, read: Callable[[torch.Tensor], float]) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * read(x.sum())

    error = check_refused(make(body, device), device, HostReadError)
    assert error.frame is not None
    assert error.frame.file == __file__
    assert "@graph_break" in str(error)


def test_branch_on_a_tensor(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    check_frame(check_refused(make(body, device), device, HostReadError), body)


def test_data_dependent_shape(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + x[x > 0].sum()

    check_frame(check_refused(make(body, device), device, DataDependentShapeError), body)


def test_host_constant(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0], device=x.device)

    check_frame(check_refused(make(body, device), device, HostConstantError), body)
    constant = torch.tensor([1.0, 2.0, 3.0], device=device.torch_device)
    check_replayed(make(lambda x: x + constant, device), device, body)


@pytest.mark.parametrize(
    "number",
    [
        lambda x: torch.tensor(0.5),
        lambda x: torch.as_tensor(0.5),
        lambda x: torch.asarray(0.5),
        lambda x: x.cpu().new_tensor(0.5) if x.is_cuda else x.new_tensor(0.5),
        lambda x: torch.tensor(0.5)[None].view(1, 1)[0, 0],
    ],
)
def test_number_accumulated_into(number: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total, scale = number(x), number(x)
        total += x.sum()
        torch.mul(x.sum(), 2, out=scale)
        return x, total, scale + number(x)

    # On a GPU a number made without a device stays on the host, where what it is added to is refused.
    device = EmulatedDevice(poison=True)
    made = make(body, device, buckets=Buckets.of(4, 8))
    for seed in (1, 2, 1):
        x = rows(device, 4, seed)
        assert isinstance(made.decide(x), Replay)
        for found, wanted in zip(made(x), body(x), strict=True):
            torch.testing.assert_close(found, wanted)
    assert made.verify()


def test_memory_without_memory() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch._efficientzerotensor(x.shape) + x

    device = EmulatedDevice()
    error = check_refused(make(body, device), device, CaptureError)
    check_frame(error, body)


def test_python_number(device: Device) -> None:
    class Scaled(nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scaled()
    made = make(model, device)
    model.scale = 5.0
    x = rows(device, 4)
    assert torch.equal(made(x), x * 5)
    assert made.stats.eager[Reason.STALE] == 1
    assert "Scaled.scale" in made.explain()

    slot = Slot("scale", (), torch.float32)
    made = make(lambda x, scale: x * scale, device, slots=[X, slot])
    for scale in (2.0, 5.0):
        assert torch.equal(made(x=x, scale=scale), x * scale)
    assert made.stats.replays.total() == 2


def test_side_effect(device: Device) -> None:
    ran: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        ran.append(x.shape[0])
        return x + 1

    made = make(body, device)
    assert ran == []
    assert made.runner.report is not None
    problem = "the body changes ran in every run, and a replay runs no Python (test_footguns.py:"
    assert all(problem in str(row.error) for row in made.runner.report.rows)
    made(rows(device, 3))
    made(rows(device, 9))
    assert ran == [3, 9]

    gaps: list[int] = []

    @graph_break
    def log(x: torch.Tensor) -> None:
        gaps.append(current().batch["x"].shape[0])

    def broken(x: torch.Tensor) -> torch.Tensor:
        log(x)
        return x + 1

    made = make(broken, device, backend="breakable")
    assert gaps == []
    made(rows(device, 3))
    made(rows(device, 9))
    assert gaps == [3, 9]


def test_an_argument_that_is_no_slot(device: Device) -> None:
    def body(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    made = make(body, device)
    x = rows(device, 4)
    assert torch.equal(made(x), x)
    with suppress(PhonographError):
        assert torch.equal(made(x, scale=3.0), x * 3)


def test_number_returned(device: Device) -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, x.shape[0]

    made = make(body, device)
    assert made.runner.report is not None
    assert "returns the number" in str(made.runner.report.failures[0].error)
    result, count = made(rows(device, 3))
    assert (result.shape[0], count) == (3, 3)


# -- padding --------------------------------------------------------------------------------------------------


def test_stale_padded_rows(device: Device) -> None:
    ids = Slot("ids", ("rows",), torch.int64, pad=Pad.fill(-1, because="no id"), valid=(0, 9))
    made = make(lambda x, ids: (x.sum(0), ids + 0, (ids >= 0).sum()), device, slots=[X, ids], buckets=Buckets.of(8))
    for count in (8, 3, 5, 1):
        x = rows(device, count, seed=count)
        total, _, num_real = made(x=x, ids=[7] * count)
        torch.testing.assert_close(total, x.sum(0))
        assert num_real.item() == count
    assert made.stats.replays.total() == 4


def test_stale_optional_input(device: Device) -> None:
    mask = Slot("mask", ("rows", 1), torch.float32, absent=1.0)
    made = make(lambda x, mask=None: x if mask is None else x * mask, device, slots=[X, mask])
    x = rows(device, 4)
    zeros = torch.zeros(4, 1, device=device.torch_device)
    assert made(x=x, mask=zeros).abs().sum().item() == 0
    assert torch.equal(made(x=x, mask=None), x)
    assert torch.equal(made(x=x), x)
    assert made.stats.replays.total() == 3


def test_padding_leaks_across_rows(device: Device) -> None:
    made = make(lambda x: x - x.mean(0), device)
    report = made.verify()
    assert not report.ok
    assert {check.name for check in report.failures} == {"unpadded"}
    assert make(lambda x: x - x.mean(1, keepdim=True), device).verify().ok


def test_false_unread_claim(device: Device) -> None:
    claimed = Slot("x", ("rows", WIDTH), torch.float32, pad=Pad.unread(because="rows are independent"))
    report = make(lambda x: x / x.abs().sum(), device, slots=[claimed]).verify()
    assert "poison" in {check.name for check in report.failures}
    assert make(lambda x: x * 2, device, slots=[claimed]).verify().ok


def test_memory_left_by_others(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty_like(x)
        scratch[:1] = 1.0
        return x + scratch

    report = make(body, device).verify()
    assert "poison" in {check.name for check in report.failures}


# -- buckets --------------------------------------------------------------------------------------------------


def test_too_large(device: Device) -> None:
    made = make(lambda x: x + 1, device)
    x = rows(device, 9)
    assert torch.equal(made(x), x + 1)
    assert made.stats.eager == {Reason.TOO_LARGE: 1}
    strict = make(lambda x: x + 1, device, strict=True)
    with pytest.raises(CoverageError, match="9 rows"):
        strict(x)


def test_open_top(device: Device) -> None:
    made = make(lambda x: x + 1, device, buckets=Buckets.up_to(100))
    for count in (1, 97, 100):
        x = rows(device, count)
        assert isinstance(made.decide(x), Replay)
        assert torch.equal(made(x), x + 1)
    decision = made.decide(rows(device, 101))
    assert isinstance(decision, RunEagerly)
    assert decision.reason is Reason.TOO_LARGE


def test_over_padding(device: Device) -> None:
    made = make(lambda x: x + 1, device, buckets=Buckets.of(4, 600))
    small, large = rows(device, 5), rows(device, 400)
    assert torch.equal(made(small), small + 1)
    assert made.stats.eager == {Reason.OVER_PADDED: 1}
    assert torch.equal(made(large), large + 1)
    assert made.stats.replays.total() == 1


def test_zero_rows(device: Device) -> None:
    made = make(lambda x: (x + 1, x.sum(0)), device)
    per_row, total = made(rows(device, 0))
    assert per_row.shape == (0, WIDTH)
    assert total.tolist() == [0] * WIDTH
    assert made.stats.replays.total() == 1


# -- whose tensor is it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [Buckets.of(2), Buckets.of(2, 4), Buckets.of(2, exact=True)])
def test_two_dims_of_one_size(device: Device, buckets: Buckets) -> None:
    slot = Slot("x", ("rows", "a", "b"), torch.float32)
    dims = [Dim("a", limit=2), Dim("b", limit=2)]
    made = make(lambda x: (x * 2).transpose(1, 2), device, slots=[slot], dims=dims, buckets=buckets)
    for shape in ((2, 1, 2), (2, 2, 1), (2, 1, 1), (2, 2, 2)):
        x = torch.ones(shape, device=device.torch_device)
        assert isinstance(made.decide(x), Replay)
        assert made(x).shape == (shape[0], shape[2], shape[1])
    assert made.verify()
    entry = made.runner._entries[made.runner.captured[-1]]
    entry.axes.update({path: {1: "a", 2: "b"} for path in entry.axes})  # as if the dims had been mistaken
    entry._fitted.clear()
    assert {check.name for check in made.verify().failures} >= {"unpadded"}


@pytest.mark.parametrize(
    "body", [lambda x: x[:, :8] * 2, lambda x: x[:, :2] * 2, lambda x: x[:3].T * 2, lambda x: x.squeeze(0)]
)
def test_an_axis_cut_at_a_length(device: Device, body: Callable[..., torch.Tensor]) -> None:
    slot = Slot("x", ("rows", "cells"), torch.float32)
    made = make(body, device, slots=[slot], dims=[Dim("cells", limit=16)], buckets=Buckets.of(4, 8))
    assert made.runner.report is not None
    assert "changes with the batch and is not a dim" in str(made.runner.report.failures[0].error)
    for shape in ((3, 5), (1, 16), (4, 1)):
        x = torch.ones(shape, device=device.torch_device)
        assert made(x).shape == body(x).shape


def test_one_size_only(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] in (7, 16)
        return x * 2

    slot = Slot("x", ("rows", "cells"), torch.float32)
    made = make(body, device, slots=[slot], dims=[Dim("cells", limit=16)])
    assert made(torch.ones(3, 7, device=device.torch_device)).shape == (3, 7)
    assert made.stats.eager == {Reason.NOT_TRIMMED: 1}
    assert made(torch.ones(3, 16, device=device.torch_device)).shape == (3, 16)
    assert made.stats.replays.total() == 1
    assert made.verify()

    # Rows in pairs, as rotary embeddings want them: sizes that run are enough to know.
    paired = make(
        lambda x: x.unflatten(1, (-1, 2)).flip(-1).flatten(1), device, slots=[slot], dims=[Dim("cells", limit=16)]
    )
    assert paired(torch.ones(3, 10, device=device.torch_device)).shape == (3, 10)
    assert paired.stats.replays.total() == 1
    assert paired.verify()


def test_outputs_overwritten(device: Device) -> None:
    made, views = make(lambda x: x + 1, device), make(lambda x: x + 1, device, outputs="view")
    one, other = rows(device, 4, seed=1), rows(device, 4, seed=2)
    first, first_view = made(one), views(one)
    torch.testing.assert_close(first_view, one + 1)
    made(other), views(other)
    torch.testing.assert_close(first, one + 1)
    torch.testing.assert_close(first_view, other + 1)


@pytest.mark.parametrize("count", [4, 9])
def test_input_returned(device: Device, count: int) -> None:
    made = make(lambda x: (x, x[:1], x.view(-1)), device)
    one, other = rows(device, count, seed=1), rows(device, count, seed=2)
    results = made(one)
    made(other)
    for result, expected in zip(results, (one, one[:1], one.view(-1)), strict=True):
        assert torch.equal(result, expected)
    results[0].zero_()
    assert torch.equal(one, rows(device, count, seed=1))


@pytest.mark.parametrize("count", [3, 9])
@pytest.mark.parametrize("capture", [True, False])
def test_callers_tensor_written(device: Device, count: int, capture: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].mul_(2).add_(1) + x.clamp_(-9, 9)  # the second changes nothing, this time

    made = make(body, device, capture=capture)
    if capture:
        assert made.runner.report is not None
        assert len(made.runner.report.failures) == 3
        error = made.runner.report.failures[1].error
        assert type(error) is InputWriteError
        assert "aten.mul_.Tensor writes the input 'x' in place" in str(error)
        check_frame(made.runner.report.failures[0].error or error, body)
    x, plain = rows(device, count), rows(device, count)
    for _ in range(3):
        assert torch.equal(made(x), body(plain))
        assert torch.equal(x, plain)

    reshaped = make(lambda x: x.unsqueeze_(0) + 1, device, capture=capture, eager_copies=True)
    for _ in range(2):
        with pytest.raises(LoadError, match="changes the shape of its input 'x' in place"):
            reshaped(x)


@pytest.mark.parametrize("capture", [True, False])
def test_one_tensor_for_two_slots(device: Device, capture: bool) -> None:
    def body(x: torch.Tensor, y: torch.Tensor, write: bool = False) -> torch.Tensor:
        return (x.mul_(2) if write else x * 2) + y

    y = Slot("y", ("rows", WIDTH), torch.float32)
    made = make(body, device, slots=[X, y], capture=capture, eager_copies=True)
    x = rows(device, 3)
    torch.testing.assert_close(made(x, x), x * 3)
    pair = torch.cat([x, x], dim=1)
    half, other = pair[:, :WIDTH], pair[:, WIDTH:]  # one memory, but no element of both
    torch.testing.assert_close(made(half, other, write=True), x * 3)
    torch.testing.assert_close(half, x * 2)
    with pytest.raises(LoadError, match="is the same memory"):
        made(x, x, write=True)
    own = make(body, device, slots=[X, y], capture=capture)
    x = rows(device, 3)
    torch.testing.assert_close(own(x, x, write=True), rows(device, 3) * 4)


@pytest.mark.parametrize("backend", ["full", "disabled"])
def test_input_kept(device: Device, backend: str) -> None:
    class Delta(nn.Module):
        before: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            change = x if self.before is None else x - self.before
            self.before = x
            return change

    plain, made = Delta(), make(Delta(), device, backend=backend)
    for seed in range(4):
        x = rows(device, 3, seed)
        assert torch.equal(made(x), plain(x))
    # A value that must be made of another is made anew: a list, another dtype.
    for seed in range(4):
        x = rows(device, 3, seed)
        given = x.tolist() if seed % 2 else x.half()
        assert torch.equal(made(given), plain(x if seed % 2 else x.half().float()))
    assert made.stats.eager.total() == 8


class MemoByIs(nn.Module):
    seen: torch.Tensor | None = None
    made: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x is not self.seen:
            self.seen, self.made = x, x.sum(1, keepdim=True)
        assert self.made is not None
        return x + self.made


class MemoById(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) not in self.made:
            self.made[id(x)] = x.sum(1, keepdim=True)
        return x + self.made[id(x)]


class MemoByCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = functools.lru_cache(lambda x: x.sum(1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.made(x)


@pytest.mark.parametrize("kind", [MemoByIs, MemoById, MemoByCache])
def test_memo_by_identity(device: Device, kind: type[nn.Module]) -> None:
    made = make(kind(), device)
    report = made.runner.report
    assert report is not None
    if kind is MemoByCache:  # nobody sees into it, and it never hits
        assert not report.failures
    else:
        assert len(report.failures) == len(report.rows)
        assert f"the body changes {kind.__name__}." in str(report.failures[0].error)
    held = []
    for seed in range(4):
        x = rows(device, 3, seed)
        torch.testing.assert_close(made(x), kind()(x))
        held.append(x)
    assert bool(made.verify()) == bool(made.runner.captured), "nothing recorded is nothing shown"


def test_weight_changed_in_place(device: Device) -> None:
    model = nn.Linear(WIDTH, 2).to(device.torch_device)
    made = make(model, device, slots=[Slot("input", ("rows", WIDTH), torch.float32)])
    x = rows(device, 4)
    before = made(x)
    with torch.no_grad():
        model.weight.mul_(3)
    after = made(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(x).detach())


def test_weight_replaced(device: Device) -> None:
    model = nn.Linear(WIDTH, 2).to(device.torch_device)
    made = make(model, device, slots=[Slot("input", ("rows", WIDTH), torch.float32)])
    x = rows(device, 4)
    made(x)
    model.weight = nn.Parameter(model.weight.detach() * 3)
    torch.testing.assert_close(made(x), model(x).detach())
    assert made.stats.eager[Reason.STALE] == 1
    made.refresh(silent)
    torch.testing.assert_close(made(x), model(x).detach())
    assert made.stats.replays.total() == 2


def test_state_written_at_capture(device: Device) -> None:
    steps = torch.zeros(1, device=device.torch_device)

    def body(x: torch.Tensor) -> torch.Tensor:
        steps.add_(1)
        return x + steps

    made = make(body, device)
    assert steps.item() == 0
    x = rows(device, 4)
    for step in range(1, 4):
        torch.testing.assert_close(made(x), x + step)
    made.verify()
    assert steps.item() == 3


# -- modes and random numbers ---------------------------------------------------------------------------------


def test_random_numbers(device: Device) -> None:
    made = make(lambda x: x + torch.rand_like(x), device)
    x = rows(device, 4)
    assert not torch.equal(made(x), made(x))
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(made(x))
    assert torch.equal(*drawn)
    assert made.stats.replays.total() == 4


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + 1


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.randn(WIDTH, device=x.device)


def state_set(x: torch.Tensor) -> torch.Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return x + 1


@pytest.mark.parametrize("body", [forked, seeded, state_set])
def test_seed_in_the_body(device: Device, body: Callable[..., torch.Tensor]) -> None:
    error = check_refused(make(body, device), device, CaptureError)
    assert "sets the random numbers, and a replay draws its own" in str(error)
    check_frame(error, body)
    torch.manual_seed(3)  # and nothing stays behind
    assert vars(torch.random)["default_generator"] is torch.default_generator


class Tripled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 3


@pytest.mark.parametrize("cache", ["autocast", "parametrize"])
def test_weight_caches(device: Device, cache: str) -> None:
    kind = device.torch_device.type
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device.torch_device)
    made = make(model, device, slots=[Slot("input", ("rows", WIDTH), torch.float32)])
    if cache == "parametrize":
        nn.utils.parametrize.register_parametrization(model, "weight", Tripled())

    def caching() -> Any:
        return nn.utils.parametrize.cached() if cache == "parametrize" else torch.autocast(kind, dtype=torch.float16)

    x = rows(device, 3)
    with caching():
        model(x)
        made.capture(silent)
        assert made.verify()
        after_capture = model(x).detach().clone()
    with torch.no_grad(), caching():
        torch.testing.assert_close(after_capture, model(x))
    with torch.no_grad():
        next(model.parameters()).mul_(3)
        with caching():
            assert isinstance(made.decide(x), Replay)
            torch.testing.assert_close(made(x), model(x))


def test_grad_enabled(device: Device) -> None:
    model = nn.Linear(WIDTH, WIDTH).to(device.torch_device)
    made = make(model, device, slots=[Slot("input", ("rows", WIDTH), torch.float32)])
    assert torch.is_grad_enabled()
    for count in (3, 9):
        x = rows(device, count).requires_grad_()
        result = made(x)
        assert not result.requires_grad
        torch.testing.assert_close(result, model(x).detach())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("captured", [torch.inference_mode, torch.no_grad])
def test_inference_mode(device: Device, backend: str, captured: Callable[[], Any]) -> None:
    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    ids = Slot("ids", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 9))
    wide = Slot("wide", ("rows", 256), torch.float32)
    with captured():
        made = make(
            lambda x, ids, wide: gap(x + ids[:, None]) + wide[:, :WIDTH], device, slots=[X, ids, wide], backend=backend
        )
    assert made.runner.report is not None
    assert not made.runner.report.failures
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for count in (3, 4, 9):
            x, numbers = rows(device, count), list(range(count))
            big = torch.ones(count, 256, device=device.torch_device)
            with mode():
                result = made(x=x, ids=numbers, wide=big)
            expected = (x + torch.tensor(numbers, device=x.device)[:, None]) * 2 + 1
            torch.testing.assert_close(result, expected)


# -- gaps -----------------------------------------------------------------------------------------------------


class Gap:
    """A gap that can be told to misbehave."""

    def __init__(self) -> None:
        self.action: Callable[[torch.Tensor], Any] = lambda x: x * 2

    @graph_break
    def run(self, x: torch.Tensor) -> Any:
        return self.action(x)


def make_broken(device: Device, gap: Gap) -> Graphed:
    made = make(lambda x: gap.run(x + 1) + 1, device, backend="breakable")
    check_replayed(made, device, lambda x: (x + 1) * 2 + 1)
    return made


def test_gap_exception(device: Device) -> None:
    gap = Gap()
    made = make_broken(device, gap)
    right = gap.action

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the gap's own")

    gap.action = fail
    with pytest.raises(KeyError, match="the gap's own"):
        made(rows(device, 3))
    assert current().phase is None
    gap.action = right
    check_replayed(made, device, lambda x: (x + 1) * 2 + 1)


def test_gap_shape_changes(device: Device) -> None:
    gap = Gap()
    made = make_broken(device, gap)
    right = gap.action
    for wrong in (lambda x: x[:1], lambda x: x.double(), lambda x: (x, x), lambda x: None):
        gap.action = wrong
        with pytest.raises(BreakError, match="gap "):
            made(rows(device, 3))
    gap.action = right
    check_replayed(made, device, lambda x: (x + 1) * 2 + 1)


def test_gap_value_changes(device: Device) -> None:
    answer = 2

    @graph_break
    def ask(x: torch.Tensor) -> int:
        return answer

    made = make(lambda x: x * ask(x), device, backend="breakable")
    x = rows(device, 4)
    assert torch.equal(made(x), x * 2)
    answer = 3
    with pytest.raises(BreakError, match="returned 3, at capture 2"):
        made(x)


def test_gap_arguments(device: Device) -> None:
    seen: list[tuple[int, int]] = []

    @graph_break
    def look(x: torch.Tensor, count: int) -> None:
        seen.append((count, current().batch["count"]))

    def body(x: torch.Tensor, count: int) -> torch.Tensor:
        look(x, count)
        return x + 1

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {"x": rows(device, extent.used["rows"], seed), "count": 100}

    made = make(body, device, backend="breakable", sample=sample, live=["count"])
    seen.clear()
    made(x=rows(device, 3), count=7)
    assert seen == [(7, 7)]


# -- failures and memory --------------------------------------------------------------------------------------


def test_gap_returns_its_argument(device: Device) -> None:
    weight = torch.ones(WIDTH, device=device.torch_device)
    factor = 1.0

    @graph_break
    def adapt(w: torch.Tensor) -> torch.Tensor:
        return w if factor == 1.0 else w * factor

    @graph_break
    def fill(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.copy_(x * factor)

    made = make(lambda x: x * adapt(weight), device, backend="breakable")
    filled = make(lambda x: fill(torch.empty_like(x), x) + 1, device, backend="breakable")
    x = rows(device, 3)
    torch.testing.assert_close(made(x), x)
    factor = 5.0
    with pytest.raises(BreakError, match=r"gap .*adapt: returned another tensor than its argument"):
        made(x)
    assert weight.tolist() == [1.0] * WIDTH
    torch.testing.assert_close(filled(x), x * 5 + 1)
    assert filled.stats.replays.total() == 1


def check_broken(made: Graphed, device: Device, problem: str, body: Callable[..., torch.Tensor]) -> CaptureError:
    """Refused by name, and calls are right all the same."""
    report = made.runner.report
    assert report is not None
    assert len(report.failures) == len(report.rows)
    error = report.failures[0].error
    assert error is not None
    assert problem in str(error)
    for seed in (1, 2):
        torch.testing.assert_close(made(rows(device, 3, seed)), body(rows(device, 3, seed)))
    return error


def test_gap_closure(device: Device) -> None:
    def looped(x: torch.Tensor) -> torch.Tensor:
        for scale in (2.0, 10.0):

            @graph_break
            def attend(q: torch.Tensor) -> torch.Tensor:
                return q * scale  # noqa: B023 - the trap

            x = attend(x)
        return x

    error = check_broken(make(looped, device, backend="breakable"), device, "the body changes 'scale'", looped)
    assert error.frame is not None
    assert error.frame.function == "attend"

    def after(x: torch.Tensor) -> torch.Tensor:
        @graph_break
        def add(q: torch.Tensor) -> torch.Tensor:
            return q + x

        y = add(x * 2)
        x = x + 1
        return x + y

    check_broken(make(after, device, backend="breakable"), device, "the body changes 'x'", after)

    num_calls = 0

    @graph_break
    def counted(q: torch.Tensor, scale: float) -> torch.Tensor:
        nonlocal num_calls  # the gap's own: it changes at every replay too
        num_calls += 1
        return q * scale

    made = make(lambda x: counted(counted(x, 2.0), 10.0), device, backend="breakable")
    check_replayed(made, device, lambda x: x * 20)


def test_gap_result_written(device: Device) -> None:
    def cached() -> Callable[..., torch.Tensor]:
        cache = torch.zeros(WIDTH, device=device.torch_device)

        @graph_break
        def get() -> torch.Tensor:
            return cache

        def body(x: torch.Tensor) -> torch.Tensor:
            held = get()
            held += x.sum(0)
            return x + held

        return body

    @graph_break
    def half(q: torch.Tensor) -> torch.Tensor:
        return q[:, :2]

    def viewed(x: torch.Tensor) -> torch.Tensor:
        q = x * 3
        half(q).mul_(10)
        return q

    problem = "the body writes in place to what the gap"
    check_broken(make(cached(), device, backend="breakable"), device, problem, cached())
    check_broken(make(viewed, device, backend="breakable"), device, problem, viewed)

    @graph_break
    def double(q: torch.Tensor) -> torch.Tensor:
        return q * 2

    check_replayed(make(lambda x: double(x).add_(1), device, backend="breakable"), device, lambda x: x * 2 + 1)


def test_gap_changes_a_container(device: Device) -> None:
    @graph_break
    def put(box: dict[str, torch.Tensor], q: torch.Tensor) -> torch.Tensor:
        box["sum"] = q.sum(1, keepdim=True)
        return q

    def body(x: torch.Tensor) -> torch.Tensor:
        box = {"sum": torch.zeros_like(x[:, :1])}
        q = put(box, x * 2)
        return q + box["sum"]

    made = make(body, device, backend="breakable")
    check_broken(made, device, "put changes a container that it is passed", body)


def test_gap_modes(device: Device) -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    kind = device.torch_device.type

    @graph_break
    def gap(q: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled(kind), torch.get_default_dtype()))
        return q * 2

    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, dtype=torch.float16):
            x = gap(x)
        torch.set_default_dtype(torch.float64)
        try:
            return gap(x)
        finally:
            torch.set_default_dtype(torch.float32)

    made = make(body, device, backend="breakable")
    seen.clear()
    x = rows(device, 3)
    torch.testing.assert_close(made(x), x * 4)
    assert made.stats.replays.total() == 1
    assert seen == [(True, torch.float32), (False, torch.float64)]
    assert torch.get_default_dtype() is torch.float32


def test_one_failing_bucket(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * x[0, 0].item() if x.shape[0] == 4 else x + 1

    made = make(body, device)
    assert made.runner.report is not None
    assert [row.key.size for row in made.runner.report.failures] == [4]
    for count in (1, 2, 5, 8):
        x = rows(device, count)
        assert torch.equal(made(x), x + 1)
    assert made.stats.replays.total() == 4
    x = rows(device, 4)
    assert torch.equal(made(x), x * x[0, 0])
    assert made.stats.eager == {Reason.CAPTURE_FAILED: 1}
    assert "rows=4" in made.explain()


def check_torch_works(device: Device) -> None:
    place = device.torch_device
    assert not torch.equal(torch.rand(4, device=place), torch.rand(4, device=place))
    model = nn.Linear(WIDTH, 2).to(place)
    model(torch.ones(2, WIDTH, device=place)).sum().backward()
    assert model.weight.grad is not None
    check_replayed(make(lambda x: x * 2 + 1, device), device, lambda x: x * 2 + 1)


@pytest.mark.parametrize("after", [1, 2, 3, 5, 7])
def test_failed_capture(device: Device, after: int) -> None:
    """The body fails at its n-th run: in a warm-up, a rehearsal or the capture itself."""
    count = Mock()  # no state of the body's own
    state = torch.zeros(2, device=device.torch_device)

    def body(x: torch.Tensor) -> torch.Tensor:
        count()
        state.add_(1)
        y = x + torch.rand_like(x)
        if count.call_count >= after:
            raise ZeroDivisionError
        return y

    made = make(body, device, buckets=Buckets.of(2, 4))
    assert made.runner.report is not None
    assert all(row.error is None or "ZeroDivisionError" in str(row.error) for row in made.runner.report.rows)
    assert state.tolist() == [0, 0]
    check_torch_works(device)


@pytest.mark.parametrize("after", [1, 2, 3, 5, 7])
def test_failing_gap_in_inference_mode(device: Device, after: int) -> None:
    count = Mock()

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        count()
        if count.call_count >= after:
            raise ZeroDivisionError
        return x * 2

    @torch.inference_mode()
    def body(x: torch.Tensor) -> torch.Tensor:
        return gap(x + 1) + 1

    made = make(body, device, buckets=Buckets.of(2, 4), backend="breakable")
    assert made.runner.report is not None
    assert made.runner.report.failures
    check_torch_works(device)


def test_garbage_collection(device: Device) -> None:
    enabled = Mock()

    class Cycle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

    def body(x: torch.Tensor) -> torch.Tensor:
        enabled(gc.isenabled())
        for _ in range(100):
            Cycle(x * 2)
        return x + 1

    threshold = gc.get_threshold()
    gc.set_threshold(10)
    try:
        made = make(body, device)
    finally:
        gc.set_threshold(*threshold)
    assert {call.args for call in enabled.call_args_list} == {(False,)}
    assert gc.isenabled()
    check_replayed(made, device, lambda x: x + 1)
    gc.disable()
    try:
        made.capture(silent)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_after_release(device: Device) -> None:
    model = nn.Linear(WIDTH, 2).to(device.torch_device)
    made = make(model, device, slots=[Slot("input", ("rows", WIDTH), torch.float32)])
    x = rows(device, 4)
    made(x)
    made.release()
    torch.testing.assert_close(made(x), model(x).detach())
    assert made.stats.eager == {Reason.NOT_CAPTURED: 1}
    weight = weakref.ref(model.weight)
    del made, model
    gc.collect()
    assert weight() is None


# -- inputs ---------------------------------------------------------------------------------------------------


def test_integer_overflow(device: Device) -> None:
    ids = Slot("ids", ("rows",), torch.int32, pad=Pad.fill(0), valid=(0, 2**31 - 1))
    made = make(lambda ids: ids + 0, device, slots=[ids])
    for value in ([1, 2**40], np.array([1, 2**40]), [1, -(2**31) - 1]):
        with pytest.raises(LoadError, match="does not fit"):
            made(ids=value)
    assert made(ids=[1, 2**31 - 1]).tolist() == [1, 2**31 - 1]
    assert made(ids=np.array([5, 6])).tolist() == [5, 6]


def test_float_into_integers(device: Device) -> None:
    ids = Slot("ids", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 9))
    made = make(lambda ids: ids + 0, device, slots=[ids])
    for value in ([1.5, 2.0], np.ones(2), torch.ones(2, device=device.torch_device), torch.ones(2)):
        with pytest.raises(LoadError, match=r"torch.int64.*float"):
            made(ids=value)
    assert made(ids=[1, 2]).tolist() == [1, 2]


def test_wrong_shape(device: Device) -> None:
    made = make(lambda x, y: x + y, device, slots=[X, Slot("y", ("rows", WIDTH), torch.float32)])
    x = rows(device, 4)
    for wrong in (rows(device, 1), rows(device, 4)[:, :1], rows(device, 5), x[0]):
        for value in (wrong, wrong.cpu().numpy()):
            with pytest.raises(LoadError, match="slot 'y' has shape"):
                made(x=x, y=value)
    assert torch.equal(made(x=x, y=x), x + x)
