"""verify judges every element by its own size, and by what rounding may move it."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from phonograph import Device, EmulatedDevice, Extent, Pad, Slot, verify
from phonograph.devices.launches import followers
from phonograph.devices.trace import OpWatch, tensors_in
from phonograph.graphs.trust.comparison import differing, mismatch
from phonograph.graphs.trust.rounding import Rounding, _noise
from runners import WIDTH, make_runner, rows, x_slot


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

    return Rounding(run)


def test_runs_are_made_once_for_all_results() -> None:
    num_runs = 0

    def body(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        return x * 2

    rounding = rounding_of(body, torch.ones(3))
    for name in ("y", "other", "y"):
        list(rounding.allowed(name, torch.ones(3)))
    assert num_runs == 17


def test_a_token_between_near_equals_takes_few_runs() -> None:
    num_runs, x = 0, torch.tensor([[1.0, 1.00001, 0.2]])

    def body(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        return (x * 1).argmax(-1)

    wanted = body(x)
    rounding, num_runs = rounding_of(body, x), 0
    assert not differing(1 - wanted, wanted, tolerance=None, allowed=partial(rounding.allowed, "y")).any()
    assert num_runs <= 5
    still = rounding_of(body, torch.tensor([[1.0, 3.0, 0.2]]))
    assert differing(1 - wanted, wanted, tolerance=None, allowed=partial(still.allowed, "y")).any()


def test_what_rounding_moves_is_told_by_element() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    rounding = rounding_of(lambda x: torch.cat([x * 1e6, (x + 1e6) - 1e6, x * 1e-6]), x)
    y = torch.cat([x * 1e6, (x + 1e6) - 1e6, x * 1e-6])
    looks = [one for one in rounding.allowed("y", y) if one is not None]
    assert len(looks) == 4
    assert all((more >= fewer).all() for fewer, more in itertools.pairwise(looks))
    allowed = looks[2]
    assert (allowed[:3] > 1).all()
    assert (allowed[:3] < 2000).all()
    assert (allowed[3:6] > 1).all(), "a small difference of large numbers"
    assert (allowed[6:] < 1e-8).all(), "small all the way"


def test_weights_and_inputs_are_left_alone_by_it() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    before = x.clone(), weight.clone()
    assert next(rounding_of(lambda x: (x @ weight).relu_().add_(1), x).allowed("y", x)) is not None
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_what_is_changed_does_not_grow_with_a_cache_that_only_lends_its_dtype() -> None:
    """A body that makes room for its results by `cache.new_empty` reads no number of the cache."""
    largest = 0

    def note(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        nonlocal largest
        result = func(*args, **kwargs)
        largest = max(largest, *(tensor.numel() for tensor in tensors_in(result)), 0)
        return result

    x, cache = torch.randn(4, 8), torch.randn(1 << 18, 8)

    def body(x: torch.Tensor) -> torch.Tensor:
        return cache.new_empty(x.shape).copy_(x * 2) + cache.new_zeros(8)

    rounding = rounding_of(body, x)
    with OpWatch(note):
        looks = [one for one in rounding.allowed("y", x) if one is not None]
    assert largest == x.numel()
    assert (looks[-1] > 0).all()


def test_where_rounding_tells_nothing_a_row_is_judged_by_its_largest() -> None:
    wanted = torch.tensor([[1e6, 1.0], [1.0, 1e-3]])
    assert not mismatch(wanted + torch.tensor([[0.0, 50.0], [0.0, 0.0]]), wanted, tolerance=None)
    assert mismatch(wanted + torch.tensor([[0.0, 0.0], [0.0, 0.5]]), wanted, tolerance=None)
    blind = rounding_of(lambda x: x, torch.ones(2))
    assert set(blind.allowed("y", torch.ones(2))) == {None}


@pytest.mark.slow
def test_among_millions_of_elements_none_seems_not_to_move() -> None:
    """Four draws leave one in a million without room; those that look wrong get more."""
    numbers = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(2048, 64, generator=numbers).half() for _ in range(2))
    exact = (x.double() @ weight.double().T).half()
    rounding = rounding_of(lambda x, w: x @ w.T, x, weight)
    wanted = x @ weight.T
    found = exact + (exact - wanted)  # as far off again, to the other side
    assert not mismatch(found, wanted, tolerance=None, allowed=lambda w: rounding.allowed("y", w))
    found[1234, 567] += 8
    assert "1 of 4,194,304" in mismatch(found, wanted, tolerance=None, allowed=lambda w: rounding.allowed("y", w))


def test_a_pick_among_near_equals_may_be_another_and_a_clear_one_may_not() -> None:
    near = torch.tensor([[1.0, 1.0001, 0.0], [1.0, 1.0001, 0.0]]).half() * 100
    clear = torch.tensor([[1.0, 1.2, 0.0], [1.0, 1.2, 0.0]]).half() * 100
    found = torch.zeros(2, dtype=torch.int64)
    for logits, problem in ((near, ""), (clear, "2 of 2 elements")):
        wanted = (logits * 1.0).argmax(1)
        rounding = rounding_of(lambda x: (x * 1.0).argmax(1), logits)
        told = mismatch(found + (wanted == 0), wanted, tolerance=None, allowed=partial(rounding.allowed, "y"))
        assert problem in told
        assert bool(told) == bool(problem)


def test_what_is_compared_with_itself_never_flips() -> None:
    """Two views of one place are changed alike."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(9))
    ranks = (x[:, :1] > x[:, 0]).sum(-1)
    rounding = rounding_of(lambda x: (x[:, :1] > x[:, 0]).sum(-1), x)
    assert mismatch(ranks + 1, ranks, tolerance=None, allowed=partial(rounding.allowed, "y"))


def test_changes_are_of_variance_one_and_differ_from_content_to_content() -> None:
    x = torch.empty(1000, 1000)
    one, other = _noise(x, 1), _noise(x, 2)
    assert abs(float(one.mean())) < 0.01
    assert abs(float(one.var()) - 1) < 0.01
    assert abs(float((one * other).mean())) < 0.01
    assert abs(float((one[1:] * one[:-1]).mean())) < 0.01
    assert abs(float((one[:, 1:] * one[:, :-1]).mean())) < 0.01
    assert torch.equal(_noise(x[5:, ::2], 1), one[5:, ::2])
    assert torch.equal(_noise(x.T, 1), one.T)
    assert _noise(torch.empty(()), 1).shape == ()
    assert _noise(torch.empty(0, 3), 1).shape == (0, 3)


def test_a_write_of_what_was_there_already_is_no_write_of_padding() -> None:
    """Some of the numbers that the run without padding writes are there already; the replay rounds otherwise."""
    numbers = torch.Generator().manual_seed(8)
    wide = torch.randn(WIDTH, 1 << 16, generator=numbers).half()
    state = torch.randn(1 << 16, generator=numbers).half()

    def body(batch: Any) -> torch.Tensor:
        x = batch["x"][:1]
        another_kernel = 1 + 2e-3 * (batch["x"].shape[0] == 8)
        read = state.double().square().sum()
        state.copy_(((x.half() * another_kernel) @ wide)[0])
        return torch.cat([batch["x"], read.expand(batch["x"].shape[0], 1)], 1)

    found = verify(make_runner(body, EmulatedDevice(), sizes=(8,)), batches=2)
    assert found, found


def told_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that torch does not dispatch, by a launcher that tells of it."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    for follow in followers:
        follow("product", (1,), {"x_ptr": x, "w_ptr": weight, "out_ptr": out})
    np.copyto(out.numpy(), x.numpy() @ weight.numpy().T)
    return out


def test_kernels_that_torch_does_not_dispatch_are_given_changed_numbers_too() -> None:
    numbers = torch.Generator().manual_seed(6)
    weights = [torch.randn(32, 32, generator=numbers) / 6 for _ in range(8)]
    before = [weight.clone() for weight in weights]
    given = torch.randn(4, 32, generator=numbers)
    same = given.clone()

    def body(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for weight in weights:
            x = told_product(x, weight)
        return x * 1.0

    y = body(given)
    seen = next(rounding_of(body, given).allowed("y", y))
    assert seen is not None
    size = y.norm() / y.numel() ** 0.5
    assert (seen / size).median() > 1e-4 * 8**0.5 / 2, "every one of the products adds its own"
    assert all(map(torch.equal, weights, before)), "only what the run made is changed"
    assert torch.equal(given, same)


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


@pytest.mark.parametrize("leaks", [False, True])
def test_a_token_picked_among_near_equals_is_counted_elsewhere_and_no_write_of_padding(leaks: bool) -> None:
    """Perturbed runs hardly ever pick the very token that the replay picks: there are too many of them."""
    counts = torch.zeros(10, 512, dtype=torch.int32)
    columns = torch.arange(512)

    def body(batch: Any) -> torch.Tensor:
        x, at = batch["x"], batch["rows"]
        rounding = 1e-7 * torch.cos((columns + 1) * (x.shape[0] * 0.37))  # as another kernel for another size would
        tokens = ((x[:, :1] * 0 + 1) * (1 + rounding)).argmax(-1)
        counts.index_put_((at, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        if leaks:
            counts[1, 500:] += x.shape[0]
        return x * 2

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        count = extent.used["seqs"]
        return {"x": rows(EmulatedDevice(), count, seed), "rows": torch.arange(1, count + 1)}

    slots = [x_slot(), Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, 9))]
    report = verify(make_runner(body, EmulatedDevice(), slots=slots, sample=sample))
    assert report.ok is not leaks, str(report)
