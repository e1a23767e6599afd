"""verify names what a body does to its inputs and draws, goes on after an exception, and leaves no trace."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from phonograph import (
    DeclarationError,
    Device,
    Extent,
    Pad,
    Reason,
    RunEagerly,
    RunnerOptions,
    Slot,
    Stage,
    VerifyError,
    VerifyReport,
    current,
    graph_break,
    graphed,
    verify,
)
from phonograph.graphs.trust.verify import verify_some
from runners import WIDTH, equal, make_runner, rows, sample_x, x_slot


def failed(report: VerifyReport) -> set[str]:
    return {check.name for check in report.failures}


# -- random numbers ---------------------------------------------------------------------------------------


def test_draws_that_padding_shifts_are_found(device: Device) -> None:
    """The first padded call gives the used rows what eager gives them; the next one does not."""
    # A GPU draws at once for a million elements and more, and counts further only from the next round on.
    width = 1 << 18 if device.torch_device.type == "cuda" else WIDTH

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        numbers = torch.Generator(device.torch_device).manual_seed(seed)
        return {"x": torch.randn(extent.used["seqs"], width, generator=numbers, device=device.torch_device)}

    runner = make_runner(
        lambda batch: batch["x"] + torch.rand_like(batch["x"]), device,
        slots=[Slot("x", ("seqs", width), torch.float32)], sample=sample, sizes=(8,),
    )  # fmt: skip
    report = verify(runner)
    assert "draws" in failed(report), str(report)
    assert "with padding more of them" in str(report)


def test_draws_for_the_largest_bucket_are_right(device: Device) -> None:
    def body(batch: Any) -> torch.Tensor:
        noise = torch.rand(8, WIDTH, device=device.torch_device)
        return batch["x"] + noise[: batch["x"].shape[0]]

    assert verify(make_runner(body, device))


def test_numbers_that_come_in_a_slot_are_right(device: Device) -> None:
    noise = Slot("noise", ("seqs", WIDTH), torch.float32)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["seqs"]
        return {"x": rows(device, count, seed), "noise": rows(device, count, seed + 1)}

    assert verify(
        make_runner(lambda batch: batch["x"] + batch["noise"], device, slots=[x_slot(), noise], sample=sample)
    )


# -- inputs -----------------------------------------------------------------------------------------------


def test_an_input_that_only_odd_sizes_write_is_named(device: Device) -> None:
    """Capture runs even sizes, and sees nothing."""

    def body(batch: Any) -> torch.Tensor:
        if batch["x"].shape[0] % 2:
            batch["x"].mul_(1)
        return batch["x"] * 2

    report = verify(make_runner(body, device))
    assert failed(report) == {"inputs"}
    assert "aten.mul_.Tensor writes the input 'x' in place" in str(report)
    assert "test_verify_leaves.py" in str(report)


def test_one_tensor_in_two_slots_is_named(device: Device) -> None:
    other = Slot("y", ("seqs", WIDTH), torch.float32)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        x = rows(device, extent.used["seqs"], seed)
        return {"x": x, "y": x}

    def body(batch: Any) -> torch.Tensor:
        return batch["x"].add_(1) * batch["y"]

    report = verify(make_runner(body, device, slots=[x_slot(), other], sample=sample))
    assert not report
    assert "writes the input 'x' in place" in str(report)
    assert "one tensor for the slots 'x' and 'y'" in str(report)
    read = make_runner(lambda batch: batch["x"] * batch["y"], device, slots=[x_slot(), other], sample=sample)
    assert verify(read)
    assert not verify(read).notes


def left_out(device: Device, body: Any, **more: Any) -> Any:
    scale = Slot("scale", ("seqs",), torch.float32)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["seqs"]
        return {"x": rows(device, count, seed), "scale": rows(device, count, seed + 1)[:, 0].contiguous()}

    names = frozenset({"scale"})
    return make_runner(body, device, slots=[x_slot(), scale], sample=sample, without=names, **more)


def test_a_body_that_reads_a_slot_which_graphs_leave_out_is_named(device: Device) -> None:
    unguarded = RunnerOptions(guard="off")  # which would refuse it before
    runner = left_out(device, lambda batch: batch["x"] * batch["scale"].sum(), options=unguarded)
    report = verify(runner, batches=1)
    assert {"inputs", "same view"} <= failed(report)
    assert "aten.sum reads the slot 'scale', which graphs leave out" in str(report)


def test_a_gap_may_read_what_graphs_leave_out(device: Device) -> None:
    @graph_break
    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[: current().batch["scale"].shape[0]] *= current().batch["scale"][:, None]
        return out

    assert verify(left_out(device, lambda batch: scaled(batch["x"]), backend="breakable"))


# -- exceptions and sizes ---------------------------------------------------------------------------------


def two_best(batch: Any) -> torch.Tensor:
    return batch["x"] + batch["x"].topk(2, 0).values.sum() * 0


def test_an_exception_is_the_failure_of_its_check(device: Device) -> None:
    report = verify(make_runner(two_best, device))
    (check,) = report.failures
    assert (check.key.size, check.used, check.name) == (2, 1, "unpadded")
    assert "raises RuntimeError" in check.detail
    assert "test_verify_leaves.py" in check.detail
    assert "smallest=" in check.detail
    assert {one.key.size for one in report.checks if one.passed} == {2, 4, 8}


def test_a_sample_that_raises_is_a_failure_too(device: Device) -> None:
    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        if extent.used["seqs"] == 3:
            raise ValueError("three is no number of rows")
        return {"x": rows(device, extent.used["seqs"], seed)}

    report = verify(make_runner(lambda batch: batch["x"] * 2, device, sample=sample))
    assert [(check.name, check.used) for check in report.failures] == [("sample", 3)]
    assert "three is no number of rows" in str(report)


def test_a_smallest_size_can_be_declared(device: Device) -> None:
    runner = make_runner(two_best, device, smallest=2)
    report = verify(runner)
    assert report
    assert min(check.used for check in report.checks) == 2
    decision = runner.decide({"x": rows(device, 1)})
    assert isinstance(decision, RunEagerly)
    assert decision.reason is Reason.TOO_SMALL
    assert "from 2 on" in decision.detail
    assert not isinstance(runner.decide({"x": rows(device, 2)}), RunEagerly)


@pytest.mark.parametrize("smallest", [0, -1, 1.5, True])
def test_a_smallest_size_is_a_whole_number(device: Device, smallest: Any) -> None:
    with pytest.raises(DeclarationError, match="smallest is"):
        make_runner(two_best, device, smallest=smallest)


def test_without_recordings_nothing_is_shown(device: Device) -> None:
    report = verify(make_runner(lambda batch: batch["x"], device, capture=False))
    assert not report
    with pytest.raises(AssertionError, match="0 checks on 0 recordings"):
        report.raise_if_failed()


# -- traces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_the_object_that_serves_is_left_as_it_was(device: Device, raises: bool, quick: bool) -> None:
    calls = torch.zeros(1, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        calls.add_(1)
        return batch["x"] * 2 + calls

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        if seed:  # not in capture
            random.random()
            np.random.rand()
            torch.rand(1)
        if raises and seed:
            raise KeyboardInterrupt
        return sample_x(device)(extent, seed)

    runner = make_runner(body, device, sample=sample, options=RunnerOptions(outputs="view", guard="off"))
    x = rows(device, 3)
    shown = runner.run({"x": x})
    before = runner.last, runner.stats.replays.copy(), vars(runner.registry.counts).copy(), runner.pool.num_loads
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    try:
        verify_some(runner, seconds=1.0) if quick else verify(runner)
    except KeyboardInterrupt:
        assert raises
    equal(shown, x * 2 + 1)
    equal(calls, torch.ones(1))
    assert before == (runner.last, runner.stats.replays, vars(runner.registry.counts), runner.pool.num_loads)
    assert random.getstate() == states[0]
    assert repr(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert runner.can_repeat
    equal(runner.repeat(), x * 2 + 2)


def test_adopted_tensors_are_left_as_they_were(device: Device) -> None:
    own = torch.full((8, WIDTH), 5.0, device=device.torch_device)
    runner = make_runner(lambda batch: batch["x"] * 2, device, adopt={"x": own})
    runner.run({"x": rows(device, 2)})
    held = own.clone()
    assert verify(runner)
    equal(own, held)


# -- a quick look -----------------------------------------------------------------------------------------


def test_a_quick_look_takes_the_largest_and_a_small_one_of_each_product_whatever_it_costs(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, device, sizes=(1, 2, 4, 6, 8))
    report = verify_some(runner, seconds=0.0)
    assert report
    looks = {(check.key.size, check.used, check.name) for check in report.checks}
    assert {look for look in looks if look[2] == "same view"} == {(8, 7, "same view")}
    assert {look[:2] for look in looks if look[2] != "same view"} == {(4, 3)}, "the smallest that is ever padded"
    assert "on 2 of 5 recordings" in report.summary
    assert {check.key.size for check in verify_some(runner, seconds=60.0).checks} == {8, 4}
    exact = make_runner(lambda batch: batch["x"] * 2, device, exact=True)
    assert {check.key.size for check in verify_some(exact, seconds=0.0).checks} == {8, 2}


def test_a_hurried_look_takes_the_largest_only_where_time_allows(device: Device) -> None:
    def body(batch: Any) -> torch.Tensor:
        if current().stage is Stage.EAGER:
            time.sleep(0.01 * batch["x"].shape[0])
        return batch["x"] * 2

    runner = make_runner(body, device, sizes=(2, 4, 8, 16, 32))

    def looked_at(seconds: float) -> set[int]:
        report = verify_some(runner, seconds=seconds, hurried=True)
        assert report
        return {check.key.size for check in report.checks if check.name == "same view"}

    assert looked_at(0.0) == {8}
    assert looked_at(0.3) == {8}, "by what smaller ones took, 32 rows take longer"
    assert looked_at(60.0) == {8, 32}


def test_a_quick_look_finds_what_a_replay_has_of_its_capture(device: Device) -> None:
    scale = [2.0]
    runner = make_runner(lambda batch: batch["x"] * scale[0], device, options=RunnerOptions(facts="off"))
    scale[0] = 3.0
    assert failed(verify_some(runner, seconds=0.0)) == {"same view", "unpadded"}


def test_a_quick_look_finds_leaks_and_state(device: Device) -> None:
    leak = make_runner(lambda batch: batch["x"] - batch["x"].mean(0), device)
    assert failed(verify_some(leak, seconds=0.0)) == {"unpadded"}
    seen = torch.zeros(1, device=device.torch_device)

    def body(batch: Any) -> torch.Tensor:
        seen.add_(batch["x"].shape[0])
        return batch["x"] * 2

    assert failed(verify_some(make_runner(body, device), seconds=0.0)) == {"state"}


def test_a_table_has_a_line_for_each_recording(device: Device) -> None:
    table = verify(make_runner(two_best, device)).table()
    assert len(table.splitlines()) == 4
    assert "decode[seqs=2]" in table
    assert "FAILED: unpadded" in table
    assert table.count(" ok") == 2


def test_padding_with_a_null_row_may_be_any_pad() -> None:
    assert Pad.fill(0, null=True).null
    assert not Pad.fill(0).null


# -- the front door ---------------------------------------------------------------------------------------


def halves(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def test_capture_verifies_where_it_is_told(device: Device) -> None:
    slots = [Slot("x", ("seqs", WIDTH), torch.float32)]
    right = graphed(lambda x: x * 2, slots=slots, bucketed="seqs", buckets=[4, 8], device=device)
    right.capture(verify=True)
    assert "verified: " in right.explain()
    right.capture()
    assert "verified: " not in right.explain()
    wrong = graphed(halves, slots=slots, bucketed="seqs", buckets=[4, 8], device=device, verify=True)
    with pytest.raises(VerifyError, match="unpadded"):
        wrong.capture()
    assert wrong.runner.captured == ()
    equal(wrong(x=rows(device, 3)), halves(rows(device, 3)))
    assert wrong.capture(verify=False).rows


def test_a_smallest_size_can_be_declared_at_the_front_door(device: Device) -> None:
    slots = [Slot("x", ("seqs", WIDTH), torch.float32)]
    run = graphed(lambda x: two_best({"x": x}), slots=slots, bucketed="seqs", buckets=[2, 4], device=device, smallest=2)
    run.capture(verify=True)
