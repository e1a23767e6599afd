"""Trial rows: rows of many sizes that a norm is tried on, and how far two results are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phonograph.sizes import ceil_div

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MANY = 8192
"""Elements of each kind of rows, about."""
_FEW = (1, 2, 3, 4, 7, 8, 16)
"""Tokens of the shortest trials."""
_TOKENS = 2048
"""Of the longest trial."""
_LARGE = 4
"""Sizes of outliers beside which the rest of a row is nothing."""
_COLUMNS = 8
"""Those with the largest weights, in which a norm is tried with outliers of all sizes."""
_DRAWN = 61
"""Rows beside outliers that are drawn; a prime number, so that signs and sizes meet all of them."""
_PART = 1 << 22
"""Elements at a time, at most, where every column has its rows."""
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
    """Element by element; what is not finite must be the same. The device is asked once."""
    dtype, strange = wanted.dtype, ~(wanted.isfinite() & found.isfinite())
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    steps = (_numbered(found) - _numbered(wanted)).abs().masked_fill(strange, 0)
    moved, most, unlike = torch.stack([(steps > 0).sum(), steps.max().long(), (strange & ~same).sum()]).tolist()
    few = moved <= _SHARE[dtype] * steps.numel() + 4
    return Apart(steps.numel(), moved, most, not unlike and few and most <= _STEPS[dtype])


def _numbered(values: torch.Tensor) -> torch.Tensor:
    """The numbers of a dtype, counted through; both zeros are 0."""
    is_single = values.dtype == torch.float32
    bits = values.contiguous().view(torch.int32 if is_single else torch.int16)
    bits = bits.to(torch.int64 if is_single else torch.int32)  # in which two of them have a difference
    return torch.where(bits >= 0, bits, -(bits + (1 << (31 if is_single else 15))))


def trial_rows(weight: torch.Tensor, eps: float, *, per_kind: int | None = None) -> torch.Tensor:
    """[num_rows, width], an even number: small and large values, whose mean is not 0, of one sign, near eps and far
    from it, with zeros and what is not finite."""
    width, dtype = weight.shape[0], weight.dtype
    count = max(2, min(64, _MANY // width)) if per_kind is None else per_kind
    largest = torch.finfo(dtype).max
    root = eps**0.5 or 1e-3
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(count, width, generator=generator, dtype=torch.float64)

    infinite, strange, some = drawn(), drawn(), drawn()
    infinite[:, -1], strange[:, -1] = torch.inf, torch.nan
    some[:, ::3] = 0.0
    kinds = [
        *(drawn(), drawn() + 3.0, 0.1 * drawn() - 1.0, 30.0 * drawn(), 4000.0 * drawn(), drawn().abs(), -drawn().abs()),
        *(root * drawn(), 0.1 * root * drawn(), 1e-3 * root * drawn()),  # eps counts
        *(torch.zeros(count, width, dtype=torch.float64), some, infinite, strange),
        *(drawn().clamp(-3, 3) * largest / 4, drawn() * torch.finfo(dtype).tiny),  # squares beyond float32, or below
    ]
    return torch.cat(kinds).to(weight.device, dtype)


def ladder(weight: torch.Tensor) -> torch.Tensor:
    """Rows of every size, by factors of four, as long as squares are numbers that float32 has to the full or exceed
    it."""
    dtype = weight.dtype
    most = torch.finfo(dtype).max
    lowest = max(-60, math.ceil(math.log2(torch.finfo(dtype).tiny)))
    scales = 2.0 ** torch.arange(lowest, math.floor(math.log2(most)), 2, dtype=torch.float64)
    scales = scales[: len(scales) // 2 * 2]
    rows = torch.randn(len(scales), weight.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (rows * scales[:, None]).clamp(-most, most).to(weight.device, dtype)


def many_tokens(rows: torch.Tensor) -> torch.Tensor:
    """The rows again and again, as a long prompt has them."""
    return rows.repeat(ceil_div(_TOKENS, len(rows)), 1)[None]


def every_column(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows in each of which one column is all that counts, by parts that fit into memory.

    Over all rows every column comes with both signs: its norm is then as large as any row can make it there, so that
    a bound of what a norm gives shows, wherever it is and whichever column has a large weight.
    """
    width = weight.shape[0]
    sizes = _outliers(weight)[-_LARGE:]
    signs = torch.tensor([1.0, -1.0], device=weight.device)
    step = max(1, min(width, _PART // (2 * width)))
    rest = _rest(2 * step, weight)
    for first in range(0, width, step):
        columns = torch.arange(first, min(first + step, width), device=weight.device)
        values = sizes[columns % _LARGE]
        yield _with_outliers(rest, columns.repeat_interleave(2), (values[:, None] * signs).flatten())


def largest_columns(rest: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Rows with outliers of all sizes and both signs where the norm multiplies by the most; `rest` is of
    `beside_outliers`."""
    columns = factor.abs().topk(min(_COLUMNS, len(factor))).indices
    sizes = _outliers(rest[0])
    values = torch.cat([sizes, -sizes])
    return _with_outliers(rest, columns.repeat_interleave(len(values)), values.repeat(len(columns)))


def beside_outliers(weight: torch.Tensor) -> torch.Tensor:
    """What rows have beside outliers; it is the same for all norms of a kind."""
    return _rest(2 * (2 + _LARGE) * _COLUMNS, weight)


def _outliers(weight: torch.Tensor) -> torch.Tensor:
    """Sizes: two that count beside the rest of a row, then those that leave nothing of it, up to the largest whose
    square float32 has."""
    root = weight.shape[0] ** 0.5
    most = min(torch.finfo(weight.dtype).max, 1e18)
    large = torch.logspace(math.log10(100 * root), math.log10(most), _LARGE, dtype=torch.float64).clamp_max(most)
    return torch.cat([torch.tensor([4.0, root], dtype=torch.float64), large]).to(weight.device, weight.dtype)


def _rest(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Some rows, again and again."""
    drawn = torch.randn(min(num_rows, _DRAWN), weight.shape[0], generator=torch.Generator().manual_seed(3))
    return drawn.to(weight.device, weight.dtype).repeat(ceil_div(num_rows, _DRAWN), 1)[:num_rows]


def _with_outliers(rest: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return rest[: len(columns)].scatter(1, columns[:, None], values.to(rest.dtype)[:, None])


def layouts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same rows as models hand them on: of a step, of one token and some, of heads before and after they are
    transposed, and as part of wider rows."""
    num_rows, width = rows.shape
    yield rows[None]
    for count in _FEW:
        yield rows[None, :count]
    heads = rows.view(1, num_rows // 2, 2, width)
    yield heads
    yield heads.transpose(1, 2)
    wider = torch.cat([rows, rows], 1)
    yield wider[None, :, width:]
