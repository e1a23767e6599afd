"""Row norm kernel: a root-mean-square norm with the roundings of somebody else's module, in one launch."""

from __future__ import annotations

import torch
import triton.language as tl

from phonograph.engine.ops.row_norm import RowNorm
from phonograph.engine.ops.triton.dependent_launch import begin, code, dependent, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.triton.rows import WIDEST_ROW
from phonograph.engine.ops.tuning import Overlap
from phonograph.sizes import ceil_div, next_power_of_two

_TILE = 1024
"""Elements of a program at least: narrow rows, as those of heads, share one."""


@kernel(unspecialised=("num_rows", "num_inner"))
def _norm_rows(
    x_ptr, weight_ptr, out_ptr,
    num_rows, num_inner, x_outer, x_inner, out_outer, out_inner, eps,
    width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
    adds_one: tl.constexpr, rounds_first: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some rows per program, held in registers between the sum of their squares and the scaling."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    inside = column < width
    begin(overlap)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if adds_one:
        weight = weight + 1.0
    outer, inner = (row // num_inner).to(tl.int64)[:, None], (row % num_inner).to(tl.int64)[:, None]
    there = (row < num_rows)[:, None] & inside
    wait_for_inputs(overlap)
    x = tl.load(x_ptr + outer * x_outer + inner * x_inner + column, mask=there, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    normed = wide * scale[:, None]
    if rounds_first:
        normed = normed.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + outer * out_outer + inner * out_inner + column, (normed * weight).to(x.dtype), mask=there)


def norm_rows(
    x: torch.Tensor, weight: torch.Tensor, norm: RowNorm, *, overlap: Overlap = "none"
) -> torch.Tensor | None:
    """As `NormsRows.norm_rows`. How a row is computed depends on its width alone, never on how many there are."""
    width = x.shape[-1]
    if not 0 < width <= WIDEST_ROW or weight.shape != (width,) or weight.stride(0) != 1:
        return None
    out = torch.empty_like(x)
    found = _two_dims(x, out)
    if found is None:
        return None
    num_outer, num_inner, strides = found
    if num_rows := num_outer * num_inner:
        columns = next_power_of_two(width)
        rows = max(1, _TILE // columns)
        _norm_rows[(ceil_div(num_rows, rows),)](
            x, weight, out, num_rows, num_inner, *strides, norm.eps,
            width=width, columns=columns, rows=rows, adds_one=norm.adds_one, rounds_first=norm.rounds_first,
            overlap=code(overlap), num_warps=min(16, max(4, rows * columns // 512)), **dependent(overlap),
        )  # fmt: skip
    return out


def _two_dims(x: torch.Tensor, out: torch.Tensor) -> tuple[int, int, tuple[int, int, int, int]] | None:
    """Rows as those of a matrix of rows: its two sizes, then the outer and inner stride of x, and those of out; None
    where they are not."""
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        return None
    dims = list[tuple[int, int, int]]()  # a size, and the strides of x and out
    for dim in zip(x.shape[:-1], x.stride()[:-1], out.stride()[:-1], strict=True):
        size, x_stride, out_stride = dim
        if size == 1:
            continue
        if dims and dims[-1][1:] == (x_stride * size, out_stride * size):
            dims[-1] = dims[-1][0] * size, x_stride, out_stride
        else:
            dims.append(dim)
    if len(dims) > 2:
        return None
    outer, inner = [(1, 0, 0)] * (2 - len(dims)) + dims
    return outer[0], inner[0], (outer[1], inner[1], outer[2], inner[2])
