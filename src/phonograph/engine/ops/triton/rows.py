"""Row-wise kernels: residual addition with the norm, and silu(gate) · up. Both read and write memory once."""

from __future__ import annotations

import torch
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
    x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, overlap: Overlap = "none"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + delta), x + delta) of rows; the sum takes the place of x where that is contiguous."""
    num_rows, width = x.shape
    if width > WIDEST_ROW:
        raise DeviceError(
            f"norm of rows of {width} elements: a row has to fit into registers, at most {WIDEST_ROW}. "
            "Use kernels='reference' for this model."
        )
    normed = torch.empty((num_rows, width), dtype=norm.weight.dtype, device=x.device)
    total = x if delta is None or x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows:
        columns = next_power_of_two(width)
        _add_norm[(num_rows,)](
            x, x if delta is None else delta, norm.weight, normed, total,
            x.stride(0), x.stride(0) if delta is None else delta.stride(0), norm.eps,
            width=width, columns=columns, has_delta=delta is not None, overlap=code(overlap),
            num_warps=min(16, max(1, columns // 512)), **dependent(overlap),
        )  # fmt: skip
    return normed, total


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
