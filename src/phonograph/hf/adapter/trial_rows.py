"""Trial rows: rows of many sizes that a norm is tried on, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MANY = 8192
"""Elements of each kind of rows, about."""
_STEPS = {torch.float32: 16, torch.float16: 4, torch.bfloat16: 4}
"""By which rounding may move an element. Sums of squares have another order: a few steps of float32, and where these
flip a rounding to half precision, and the product with a weight is rounded again, at most four of that."""
_SHARE = {torch.float32: 1.0, torch.float16: 0.002, torch.bfloat16: 0.002}
"""Of the elements that may be moved at all; another place of a rounding moves a third of them."""


@dataclass(frozen=True)
class Apart:
    """How far two results are apart."""

    count: int
    """Elements."""
    moved: int
    """Those that differ."""
    steps: int
    """The most numbers of the dtype from one to the other."""
    is_rounding: bool
    """Whether it is no more than that."""

    def __str__(self) -> str:
        if not self.moved:
            return f"all of {self.count:,} elements have equal bits"
        last = "step" if self.steps == 1 else "steps"
        return f"{self.moved:,} of {self.count:,} elements differ, by at most {self.steps} {last} of their dtype"


NOTHING, UNLIKE = Apart(0, 0, 0, True), Apart(0, 0, 0, False)
"""Of no elements, and of results that have other shapes or the like."""


def added(all_of: Sequence[Apart]) -> Apart:
    """Of several results."""
    return Apart(
        sum(one.count for one in all_of),
        sum(one.moved for one in all_of),
        max(one.steps for one in all_of),
        all(one.is_rounding for one in all_of),
    )


def apart(found: torch.Tensor, wanted: torch.Tensor) -> Apart:
    """Element by element; what is not finite must be the same."""
    dtype = wanted.dtype
    strange = ~wanted.isfinite()
    same = torch.equal(found.isfinite(), ~strange)
    same = same and torch.equal(found[strange].nan_to_num(0.5), wanted[strange].nan_to_num(0.5))
    steps = (_numbered(found) - _numbered(wanted)).abs().masked_fill(strange, 0)
    count, moved, most = steps.numel(), int((steps > 0).sum()), int(steps.max())
    few = moved <= _SHARE[dtype] * count + 4
    return Apart(count, moved, most, same and few and most <= _STEPS[dtype])


def _numbered(values: torch.Tensor) -> torch.Tensor:
    """The numbers of a dtype, counted through; both zeros are 0."""
    bits = values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16).long()
    sign = 1 << (31 if values.dtype == torch.float32 else 15)
    return torch.where(bits >= 0, bits, -(bits + sign))


def trial_rows(weight: torch.Tensor, eps: float, *, per_kind: int | None = None) -> torch.Tensor:
    """[num_rows, width], an even number: small and large values, whose mean is not 0, near eps and far from it, with
    zeros, outliers and what is not finite."""
    width, dtype = weight.shape[0], weight.dtype
    count = max(2, min(64, _MANY // width)) if per_kind is None else per_kind
    largest = torch.finfo(dtype).max
    root = eps**0.5 or 1e-3
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(count, width, generator=generator, dtype=torch.float64)

    outlier = drawn()
    outlier[:, 0] = 300.0
    infinite, strange = drawn(), drawn()
    infinite[:, -1], strange[:, -1] = torch.inf, torch.nan
    kinds = [
        *(drawn(), drawn() + 3.0, 0.1 * drawn() - 1.0, 30.0 * drawn(), 4000.0 * drawn()),
        *(root * drawn(), 0.1 * root * drawn(), 1e-3 * root * drawn()),  # eps counts
        *(torch.zeros(count, width, dtype=torch.float64), outlier, infinite, strange),
        *(drawn().clamp(-3, 3) * largest / 4, drawn() * torch.finfo(dtype).tiny),  # squares beyond float32, or below
    ]
    return torch.cat(kinds).to(weight.device, dtype)


def layouts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same rows as models hand them on: of a step, of one token, of heads before and after they are transposed, and
    as part of wider rows."""
    num_rows, width = rows.shape
    yield rows[None]
    yield rows[None, :1]
    heads = rows.view(1, num_rows // 2, 2, width)
    yield heads
    yield heads.transpose(1, 2)
    wider = torch.cat([rows, rows], 1)
    yield wider[None, :, width:]
