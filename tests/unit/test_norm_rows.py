"""The kernel of row norms (interpreted where there is no GPU) against float64 and torch's own ops."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from phonograph.engine.ops.row_norm import NormsRows, RowNorm, norm_rows
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.triton.rows import WIDEST_ROW
from phonograph.engine.ops.tuning import Tuning
from phonograph.hf.adapter.trial_rows import Apart, apart, layouts, trial_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter cuts bfloat16 off where a GPU rounds to the nearest.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
KINDS = [RowNorm(1e-6, *kind) for kind in itertools.product((False, True), repeat=2)]
KERNELS = TritonKernels(DEVICE, Tuning({}))

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def launched(x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    found = KERNELS.norm_rows(x, weight, norm)
    assert found is not None
    return found


def weights(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(width).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", KINDS, ids=str)
@pytest.mark.parametrize("width", [2, 16, 100, 128, 2304])
def test_it_is_torchs_norm_but_for_rounding(width: int, norm: RowNorm, dtype: torch.dtype) -> None:
    """Zeros, values near eps and below it, outliers, squares beyond float32, and what is not finite."""
    weight = weights(width, dtype)
    for rows in layouts(trial_rows(weight, norm.eps, per_kind=4)):
        found, wanted = launched(rows, weight, norm), norm_rows(rows, weight, norm)
        assert apart(found, wanted).is_rounding, apart(found, wanted)
        assert found.shape == wanted.shape
        assert found.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", KINDS, ids=str)
def test_it_is_near_the_exact_norm(norm: RowNorm, dtype: torch.dtype) -> None:
    x, weight = 5 * torch.randn(40, 96).to(DEVICE, dtype) + 1, weights(96, dtype)
    exact, factor = x.double(), weight.double() + norm.adds_one
    exact = exact / (exact.square().mean(-1, keepdim=True) + norm.eps).sqrt() * factor
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(launched(x, weight, norm).double(), exact, rtol=2 * rounding, atol=rounding)


def test_each_place_of_a_rounding_has_its_bits() -> None:
    """Rounded before the weight or after: a third of the elements differ."""
    rows = torch.randn(64, 64).to(DEVICE, torch.float16)
    weight = weights(64, torch.float16)
    found = [launched(rows, weight, norm) for norm in KINDS]
    for one, other in itertools.combinations(found, 2):
        assert not apart(one, other).is_rounding
        assert apart(one, other).moved > 0.1 * rows.numel()


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    rows, weight = torch.randn(37, 24).to(DEVICE), weights(24, torch.float32)
    whole = launched(rows, weight, KINDS[0])
    for count in (1, 2, 36):
        assert torch.equal(launched(rows[:count], weight, KINDS[0]), whole[:count])
    assert launched(rows[:0], weight, KINDS[0]).shape == (0, 24)


def test_results_lie_as_those_of_torchs_ops() -> None:
    x, weight = torch.randn(1, 6, 4, 16).to(DEVICE), weights(16, torch.float32)
    for one in (x, x.transpose(1, 2), x[:, :, 1:3], x[:, ::2, 1], x[0, 0, 0]):
        wanted = norm_rows(one, weight, KINDS[0])
        assert launched(one, weight, KINDS[0]).stride() == wanted.stride()


def test_layouts_that_it_does_not_know_are_declined() -> None:
    norm, x = KINDS[0], torch.randn(4, 3, 2, 16).to(DEVICE)
    weight = weights(16, torch.float32)
    assert KERNELS.norm_rows(x.permute(2, 1, 0, 3), weight, norm) is None  # three strides of rows
    assert KERNELS.norm_rows(x.transpose(2, 3), weights(2, torch.float32), norm) is None
    assert KERNELS.norm_rows(x, weights(15, torch.float32), norm) is None
    assert KERNELS.norm_rows(x, weights(32, torch.float32)[::2], norm) is None
    assert (
        KERNELS.norm_rows(x.flatten().expand(WIDEST_ROW + 1, -1).t(), weights(WIDEST_ROW + 1, torch.float32), norm)
        is None
    )


def test_x_is_not_changed() -> None:
    x, weight = torch.randn(3, 16).to(DEVICE), weights(16, torch.float32)
    kept = x.clone()
    launched(x, weight, KINDS[0])
    assert torch.equal(x, kept)


def test_kernels_say_that_they_have_it() -> None:
    from phonograph.engine.ops.layers.reference import ReferenceKernels

    assert isinstance(KERNELS, NormsRows)
    assert not isinstance(ReferenceKernels(), NormsRows)


class TestApart:
    def test_steps_are_counted_across_zero(self) -> None:
        one = torch.tensor([0.0, -0.0, 1.0, 6e-8])
        other = torch.tensor([-0.0, 0.0, 1.0, -6e-8])
        found = apart(one.half(), other.half())
        assert (found.count, found.moved, found.steps) == (4, 1, 2)

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_what_is_not_finite_must_be_the_same(self, value: float) -> None:
        one = torch.tensor([1.0, value])
        assert apart(one, one.clone()).is_rounding
        for other in (torch.finfo(torch.float32).max, 0.0, torch.inf if value != torch.inf else torch.nan):
            assert not apart(torch.tensor([1.0, other]), one).is_rounding

    def test_many_small_differences_are_no_rounding(self) -> None:
        one = torch.ones(4096, dtype=torch.float16)
        other = one.clone()
        other[:6] += 2**-10
        assert apart(one, other) == Apart(4096, 6, 1, True)
        assert str(apart(one, other)) == "6 of 4,096 elements differ, by at most 1 step of their dtype"
        other[:60] = 1 + 2**-10
        assert not apart(one, other).is_rounding
        assert str(apart(one, one)) == "all of 4,096 elements have equal bits"

    def test_a_large_difference_is_no_rounding(self) -> None:
        one = torch.ones(4096)
        other = one.clone()
        other[7] = 1 + 20 * 2**-23
        assert not apart(one, other).is_rounding
