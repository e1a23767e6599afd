"""Row-wise kernels: residual addition with the norm, norms side by side, silu(gate) · up; memory is passed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.triton.dependent_launch import begin, code, dependent, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Overlap
from phonograph.errors import DeviceError
from phonograph.sizes import ceil_div, next_power_of_two

WIDEST_ROW = 16384
_SILU_BLOCK = 1024


@kernel()
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, normed_ptr, sum_ptr,
    x_row, delta_row, eps,
    width: tl.constexpr, columns: tl.constexpr, has_delta: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One row per program, held in registers between the sum of its squares and the scaling."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    inside = column < width
    begin(overlap)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(overlap)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0)
    if has_delta:
        # The norm is that of what is kept, in the dtype of the residual stream.
        x = (x.to(tl.float32) + tl.load(delta_ptr + row * delta_row + column, mask=inside, other=0.0)).to(x.dtype)
        tl.store(sum_ptr + row * width + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale * weight.to(tl.float32)
    tl.store(normed_ptr + row * width + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@kernel(unspecialised=["first_row", "second_row", "third_row"])
def _joined_norms(
    first_ptr, second_ptr, third_ptr, first_weight_ptr, second_weight_ptr, third_weight_ptr, joined_ptr,
    first_row, second_row, third_row, first_eps, second_eps, third_eps,
    width: tl.constexpr, columns: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One row of one input per program."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, columns)
    inside = column < width
    begin(overlap)
    wait_for_inputs(overlap)
    if part == 0:
        normed = _normed(first_ptr + row * first_row, first_weight_ptr, first_eps, column, inside, width)
    elif part == 1:
        normed = _normed(second_ptr + row * second_row, second_weight_ptr, second_eps, column, inside, width)
    else:
        normed = _normed(third_ptr + row * third_row, third_weight_ptr, third_eps, column, inside, width)
    place = (row * count + part) * width + column
    tl.store(joined_ptr + place, normed.to(joined_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed(x_ptr, weight_ptr, eps, column, inside, width: tl.constexpr):
    """In float32."""
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@kernel()
def _silu_mul(
    mixed_ptr, out_ptr, mixed_row, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """A block of columns of one row: gate in the first half of `mixed`, up in the second."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    begin(overlap)
    wait_for_inputs(overlap)
    gate = tl.load(mixed_ptr + row * mixed_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(mixed_ptr + row * mixed_row + width + column, mask=inside, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, gated.to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False, overlap: Overlap = "none"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + delta), x + delta) of rows; the sum takes the place of x if that is contiguous and nobody keeps it."""
    num_rows, width = x.shape
    columns = next_power_of_two(_held(width))
    normed = torch.empty((num_rows, width), dtype=norm.weight.dtype, device=x.device)
    in_place = delta is None or (x.is_contiguous() and not keeps)
    total = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows:
        _add_norm[(num_rows,)](
            x, x if delta is None else delta, norm.weight, normed, total,
            x.stride(0), x.stride(0) if delta is None else delta.stride(0), norm.eps,
            width=width, columns=columns, has_delta=delta is not None, overlap=code(overlap),
            num_warps=min(16, max(1, columns // 512)), **dependent(overlap),
        )  # fmt: skip
    return normed, total


def joined_norms(parts: Sequence[torch.Tensor], norms: Sequence[Norm], *, overlap: Overlap = "none") -> torch.Tensor:
    """Two or three inputs of one width, each normed, side by side."""
    num_rows, width = parts[0].shape
    joined = torch.empty((num_rows, len(parts) * width), dtype=norms[0].weight.dtype, device=parts[0].device)
    if num_rows:
        # A third that is not there has no programs.
        three, their = (*parts, parts[-1])[:3], (*norms, norms[-1])[:3]
        columns = next_power_of_two(_held(width))
        _joined_norms[(num_rows, len(parts))](
            *three, *(norm.weight for norm in their), joined,
            *(part.stride(0) for part in three), *(norm.eps for norm in their),
            width=width, columns=columns, overlap=code(overlap),
            num_warps=min(16, max(1, columns // 512)), **dependent(overlap),
        )  # fmt: skip
    return joined


def _held(width: int) -> int:
    """The width of rows that a program can hold."""
    if width > WIDEST_ROW:
        raise DeviceError(
            f"norm of rows of {width} elements: a row has to fit into registers, at most {WIDEST_ROW}. "
            "Use kernels='reference' for this model."
        )
    return width


def silu_mul(mixed: torch.Tensor, *, overlap: Overlap = "none") -> torch.Tensor:
    """silu(gate) · up, where gate and up are the halves of the rows of `mixed`."""
    num_rows, width = mixed.shape[0], mixed.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=mixed.dtype, device=mixed.device)
    if num_rows:
        _silu_mul[(num_rows, ceil_div(width, _SILU_BLOCK))](
            mixed,
            out,
            mixed.stride(0),
            width=width,
            block=_SILU_BLOCK,
            overlap=code(overlap),
            num_warps=4,
            **dependent(overlap),
        )
    return out
