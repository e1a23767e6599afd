"""verify judges every element by its own size, and by what rounding may move it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph import Device, EmulatedDevice, verify
from phonograph.graphs.trust.comparison import mismatch
from phonograph.graphs.trust.rounding import Rounding
from runners import WIDTH, make_runner


def large(device: Device) -> torch.Tensor:
    return (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) * 1e6).to(device.torch_device)


@pytest.mark.parametrize("scaled", [lambda x, weight: x * 1e6, lambda x, weight: x @ weight])
def test_a_leak_beside_large_numbers_in_its_row_is_found(device: Device, scaled: Any) -> None:
    weight = large(device)

    def body(batch: Any) -> torch.Tensor:
        x = batch["x"]
        return torch.cat([scaled(x, weight), x - x.mean(0)], 1)

    report = verify(make_runner(body, device))
    assert {check.name for check in report.failures} == {"unpadded"}
    assert all("elements)" in check.detail for check in report.failures)


def test_a_leak_in_a_row_of_tiny_numbers_is_found(device: Device) -> None:
    def body(batch: Any) -> torch.Tensor:
        x = batch["x"]
        return torch.cat([x, (x - x.mean(0)) * 1e-7], 1)

    assert {check.name for check in verify(make_runner(body, device)).failures} == {"unpadded"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding_in_the_difference_of_large_numbers_is_no_leak(dtype: torch.dtype) -> None:
    """The output is nothing but rounding, and other sizes have other kernels: no digit of it is the same."""
    numbers = torch.Generator().manual_seed(4)
    one, other = (torch.randn(64, 64, generator=numbers).to(dtype) for _ in range(2))
    wide = torch.randn(WIDTH, 64, generator=numbers).to(dtype)

    def body(batch: Any) -> torch.Tensor:
        x = (batch["x"].to(dtype) @ wide) * (1 + 1e-3 * batch["x"].shape[0] * 0)
        grouped = (x @ one) @ other
        return grouped - x @ (one @ other)

    assert verify(make_runner(body, EmulatedDevice(), sizes=(3, 8, 33)), batches=3)


def rounding_of(function: Any, *inputs: torch.Tensor) -> Rounding:
    def run(around: Any) -> dict[str, torch.Tensor]:
        with around:
            return {"y": function(*inputs)}

    return Rounding(run, torch.device("cpu"))


def test_what_rounding_moves_is_told_by_element() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    rounding = rounding_of(lambda x: torch.cat([x * 1e6, (x + 1e6) - 1e6, x * 1e-6]), x)
    y = torch.cat([x * 1e6, (x + 1e6) - 1e6, x * 1e-6])
    allowed = rounding.allowed("y", y)
    assert allowed is not None
    assert (allowed[:3] > 1).all()
    assert (allowed[:3] < 2000).all()
    assert (allowed[3:6] > 1).all(), "a small difference of large numbers"
    assert (allowed[6:] < 1e-8).all(), "small all the way"


def test_weights_and_inputs_are_left_alone_by_it() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    before = x.clone(), weight.clone()
    assert rounding_of(lambda x: (x @ weight).relu_().add_(1), x).allowed("y", x) is not None
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_where_rounding_tells_nothing_a_row_is_judged_by_its_largest() -> None:
    wanted = torch.tensor([[1e6, 1.0], [1.0, 1e-3]])
    assert not mismatch(wanted + torch.tensor([[0.0, 50.0], [0.0, 0.0]]), wanted, tolerance=None)
    assert mismatch(wanted + torch.tensor([[0.0, 0.0], [0.0, 0.5]]), wanted, tolerance=None)
    blind = rounding_of(lambda x: x, torch.ones(2))
    assert blind.allowed("y", torch.ones(2)) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 2.0])
def test_what_is_not_finite_must_be_the_same(wrong: float) -> None:
    wanted = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert not mismatch(wanted.clone(), wanted, tolerance=None)
    for place in range(4):
        found = wanted.clone()
        found[place] = wrong
        same = bool(torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)))
        assert bool(mismatch(found, wanted, tolerance=None)) != same


def test_what_is_masked_with_infinity_is_still_judged_by_element(device: Device) -> None:
    """A mask of -inf stays what it is when rounding is tried."""
    weight = large(device)

    def body(batch: Any) -> torch.Tensor:
        x = batch["x"]
        mask = torch.full((WIDTH,), -torch.inf, device=x.device)
        mask[:2] = 0.0
        return torch.cat([x @ weight, (x + mask).softmax(-1) * 1e-3], 1)

    assert verify(make_runner(body, device, sizes=(3, 8, 33)), batches=3)
