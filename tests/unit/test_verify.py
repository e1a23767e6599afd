"""verify: finds what it must find, and leaves everything as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from phonograph import (
    DeclarationError,
    Device,
    EmulatedDevice,
    Extent,
    Pad,
    RunnerOptions,
    Slot,
    VerifyError,
    current,
    graph_break,
    verify,
)
from phonograph.graphs.phases.phase import sample_from
from runners import WIDTH, equal, make_runner, rows, sample_x, x_slot


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_right_recording_passes_every_check(device: Device, backend: str) -> None:
    runner = make_runner(lambda batch: batch["x"].softmax(-1), device, backend=backend)
    report = verify(runner, batches=3)
    assert report.ok
    assert report
    assert {check.name for check in report.checks} == {"inputs", "poison", "same view", "unpadded", "draws", "state"}
    assert {check.key for check in report.checks} == set(runner.captured)
    assert {check.used for check in report.checks} == {1, 2, 3, 4, 5, 6, 8}
    report.raise_if_failed()


def test_padding_that_leaks_into_used_rows_is_found(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] - batch["x"].mean(0), device)
    report = verify(runner)
    assert {check.name for check in report.failures} == {"unpadded"}
    assert not report  # `assert run.verify()` says so
    with pytest.raises(VerifyError, match=r"unpadded: output .* differs by up to"):
        report.raise_if_failed()


@pytest.mark.parametrize(
    "wrong", [{"batches": n} for n in (0, -1, 1.5, True)] + [{"tolerance": t} for t in (-1e-3, math.nan, math.inf)]
)
def test_arguments_that_check_nothing_are_refused(wrong: dict[str, Any]) -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, EmulatedDevice())
    with pytest.raises(DeclarationError, match=r"verify\(\w+=.*Give a"):
        verify(runner, **wrong)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16])
def test_dtypes_that_torch_hardly_computes_with_are_compared(dtype: torch.dtype) -> None:
    slot = Slot("x", ("seqs", WIDTH), dtype, pad=Pad.fill(0))
    wide = dtype if dtype.is_complex else torch.float32
    factor = 2.0

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {"x": torch.ones(extent.used["seqs"], WIDTH).to(dtype)}

    def body(batch: Any) -> torch.Tensor:
        out: torch.Tensor = (batch["x"].to(wide) * factor).to(dtype)
        return out

    runner = make_runner(body, EmulatedDevice(), slots=[slot], sample=sample)
    assert verify(runner)
    factor = 3.0
    assert "differs by up to 1" in str(verify(runner))


def test_an_infinite_output_hides_no_wrong_one_beside_it(device: Device) -> None:
    """Masked logits are infinite, and are no scale to measure the others by; NaN is no zero."""

    def body(batch: Any) -> torch.Tensor:
        x = batch["x"] - batch["x"].mean(0)
        x[:, 0] = -torch.inf
        return x

    assert {check.name for check in verify(make_runner(body, device)).failures} == {"unpadded"}
    value = 0.0
    runner = make_runner(lambda batch: batch["x"] * 0 + value, device)
    value = math.nan
    assert {check.name for check in verify(runner).failures} == {"same view", "unpadded", "facts"}


def test_a_false_claim_that_padding_is_unread_is_found(device: Device) -> None:
    slot = Slot("x", ("seqs", WIDTH), torch.float32, pad=Pad.unread(because="rows are independent"))
    honest = make_runner(lambda batch: batch["x"] * 2, device, slots=[slot])
    assert verify(honest).ok
    false = make_runner(lambda batch: batch["x"] * 2 + batch["x"].sum(), device, slots=[slot])
    assert "poison" in {check.name for check in verify(false).failures}


def test_poison_stays_inside_the_valid_range(device: Device) -> None:
    table = torch.arange(5.0, device=device.torch_device)
    index = Slot("index", ("seqs",), torch.int64, pad=Pad.unread(because="rows are independent"), valid=(0, 4))

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {"index": torch.zeros(extent.used["seqs"], dtype=torch.int64, device=device.torch_device)}

    runner = make_runner(lambda batch: table[batch["index"]], device, slots=[index], sample=sample)
    assert verify(runner).ok


def test_a_value_frozen_at_capture_is_found(device: Device) -> None:
    """The body reads a Python number that capture froze and eager sees."""
    factor = 2.0
    runner = make_runner(lambda batch: batch["x"] * factor, device)
    assert verify(runner).ok
    factor = 3.0
    assert {check.name for check in verify(runner).failures} == {"same view", "unpadded", "facts"}


def test_memory_that_another_recording_left_is_found() -> None:
    """A body that reads what it never wrote sees whatever lies in the pool."""
    device = EmulatedDevice()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        scratch = torch.empty(WIDTH, device=device.torch_device)
        return batch["x"] + scratch * 0.5

    report = verify(make_runner(body, device))
    assert "poison" in {check.name for check in report.failures}


def test_state_is_compared_and_restored(device: Device) -> None:
    cache = torch.ones(8, WIDTH, device=device.torch_device)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        cache[: batch["x"].shape[0]].add_(batch["x"])
        return cache[: batch["x"].shape[0]] * 2

    runner = make_runner(body, device)
    assert verify(runner).ok
    equal(cache, torch.ones(8, WIDTH))
    runner.run({"x": rows(device, 8)})
    equal(cache, rows(device, 8) + 1)


def test_state_that_only_some_sizes_write_is_left_alone(device: Device) -> None:
    """An eager run at the size of a bucket's smallest batch writes where no recording does."""
    held = {size: torch.zeros(WIDTH, device=device.torch_device) for size in range(9)}

    def body(batch: dict[str, Any]) -> torch.Tensor:
        held[batch["x"].shape[0]].add_(1)
        return batch["x"] * 2

    verify(make_runner(body, device), batches=4)
    assert not any(bool(one.any()) for one in held.values())


def test_python_state_of_gaps_is_left_alone(device: Device) -> None:
    calls: list[int] = []

    @graph_break
    def log(x: torch.Tensor) -> None:
        calls.append(x.shape[0])

    def body(batch: dict[str, Any]) -> torch.Tensor:
        log(batch["x"])
        return batch["x"] * 2

    runner = make_runner(body, device, backend="breakable")
    assert verify(runner).ok
    assert calls == []
    runner.run({"x": rows(device, 3)})
    assert calls == [4]


def test_random_numbers_are_the_same_for_every_run_and_the_generator_is_left_alone(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] + torch.rand(WIDTH, device=device.torch_device), device)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert verify(runner).ok
    assert torch.equal(before, torch.get_rng_state())


def test_gaps_see_the_live_batch_in_every_check(device: Device) -> None:
    @graph_break
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * current().batch["x"].shape[0]

    assert verify(make_runner(lambda batch: scale(batch["x"]), device, backend="breakable")).ok


def test_exact_sizes_are_verified_at_their_own_size(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"] * 2, device, exact=True)
    report = verify(runner)
    assert report.ok
    assert all(check.used == check.key.size for check in report.checks)


def test_it_says_what_it_could_not_try(device: Device) -> None:
    assert "nothing is captured" in str(verify(make_runner(lambda batch: batch["x"], device, capture=False)))
    lens = Slot("lens", ("seqs",), torch.int32, pad=Pad.fill(1))

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        ones = torch.ones(extent.used["seqs"], dtype=torch.int32, device=device.torch_device)
        return {**sample_x(device)(extent, seed), "lens": ones}

    runner = make_runner(
        lambda batch: batch["x"] * batch["lens"][:, None], device, slots=[x_slot(), lens], sample=sample
    )
    assert "slot 'lens' names no valid range" in str(verify(runner))


def test_a_tolerance_allows_other_kernels_in_capture(device: Device) -> None:
    factor = 1.0
    runner = make_runner(lambda batch: batch["x"] * factor, device, options=RunnerOptions(facts="off"))
    factor = 1.001
    assert not verify(runner).ok
    assert verify(runner, tolerance=1e-2).ok


def test_rounding_is_no_writing_of_padding() -> None:
    """Two runs write the same numbers, rounded differently: some of their bytes are what they were before."""
    device = EmulatedDevice()
    state = torch.ones(64)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        state[:] = 1 + 2.0 ** (-23 if batch["x"].shape[0] % 2 == 0 else -15)  # the first byte, or the second
        return batch["x"] * 2

    assert verify(make_runner(body, device), tolerance=1e-3)


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_padding_that_writes_fails_unless_its_null_row_is_declared(device: Device, offset: float, null: bool) -> None:
    """The sample never uses row 0, so no output shows that padding overwrites it; it may even write what is there."""
    on = device.torch_device
    cache = torch.zeros(9, WIDTH, device=on)
    slot = Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=null), valid=(0, 8))

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {
            "x": rows(device, extent.used["seqs"], seed),
            "rows": torch.arange(1, extent.used["seqs"] + 1, device=on),
        }

    def body(batch: dict[str, Any]) -> torch.Tensor:
        cache[batch["rows"]] = batch["x"] + offset
        return cache[batch["rows"]] * 2

    report = verify(make_runner(body, device, slots=[x_slot(), slot], sample=sample))
    assert report.ok == null
    assert {check.name for check in report.failures} == (set() if null else {"state"})
    assert null or "of the state cache, which a run without padding leaves alone" in str(report)
    assert null or "Pad.fill(value, null=True)" in str(report)
    assert not cache.any()


def test_a_null_row_inside_the_valid_range_is_left_to_padding(device: Device) -> None:
    """Samples that a slot draws by itself do not name the row that padding has."""
    cache = torch.zeros(9, WIDTH, device=device.torch_device)
    slot = Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(8, null=True), valid=(0, 8))

    def body(batch: dict[str, Any]) -> torch.Tensor:
        cache.index_fill_(0, batch["rows"], 1.0)
        return batch["x"] + cache[batch["rows"]]

    slots = [x_slot(), slot]
    sample = sample_from(slots, device.torch_device)
    assert all(8 not in sample(Extent({"seqs": 8}, {"seqs": 8}), seed)["rows"] for seed in range(9))
    assert verify(make_runner(body, device, slots=slots, sample=sample)).ok
