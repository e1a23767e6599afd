"""Matrix products: a weight matrix times a few rows; the weights stream past once, tensor cores keep up with them.

As for one vector, the norm's scale is applied to the sums. Where a matrix has too few rows to keep all
multiprocessors busy, its columns are split among programs; the last one to finish adds the parts up, always in the
order of the columns, so that results do not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.triton.dependent_launch import (
    LINE,
    begin,
    code,
    dependent,
    nearly_done,
    prefetch,
    wait_for_inputs,
)
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Choice
from phonograph.sizes import ceil_div, next_power_of_two


@triton.jit
def _inputs(
    x_ptr, delta_ptr, norm_ptr, sum_ptr, token, column, num_tokens, x_row, delta_row, tile,
    width: tl.constexpr, has_norm: tl.constexpr, has_delta: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """(what the weights are multiplied with, in the weights' dtype; its squares before the norm's weight)."""
    mask = (token < num_tokens)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_row + column[None, :], mask=mask, other=0.0)
    if has_delta:
        delta = tl.load(delta_ptr + token[:, None] * delta_row + column[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        is_written = (token < tl.where(tile == 0, num_tokens, 0))[:, None] & (column < width)[None, :]
        tl.store(sum_ptr + token[:, None] * width + column[None, :], x, mask=is_written)
    squares = tl.zeros([token.shape[0]], tl.float32)
    if has_norm:
        wide = x.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
        # Loaded once per token: as wide as x, it travels through the same pipeline instead of stalling it.
        weight = tl.load(norm_ptr + token[:, None] * 0 + column[None, :], mask=mask, other=0.0)
        x = wide * weight.to(tl.float32)
    return x.to(dtype), squares


@triton.jit
def _multiplied(x, weight, total, swap: tl.constexpr):
    """total + x · weightᵀ; swapped, the weights are the tall operand, [rows, block], and total is transposed."""
    if swap:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit
def _collected(total, parts_ptr, counter_ptr, tile, part, split: tl.constexpr, size: tl.constexpr):
    """(the sum over all parts, whether this program is the last and has it). The counter is left at zero."""
    rows: tl.constexpr = total.shape[0]
    columns: tl.constexpr = total.shape[1]
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    base = parts_ptr + tile.to(tl.int64) * split * size
    tl.store(base + part * size + at, total)
    # Every thread's part is stored before one of them says so; the counter orders it for the other programs.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split - 1
    total = tl.zeros([rows, columns], tl.float32)
    if is_last:
        for other in range(split):
            total += tl.load(base + other * size + at, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return total, is_last


@triton.jit
def _finish(
    total, up_total, scale, bias_ptr, out_ptr, token, row, mask, num_out, has_bias: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Scale, bias or gate, and the store of a tile of outputs; scale, token and row have the shape of an axis of it."""
    out = total * scale
    if has_bias:
        out += tl.load(bias_ptr + row, mask=row < num_out, other=0.0).to(tl.float32)
    if gated:
        out = out * tl.sigmoid(out) * (up_total * scale)
    tl.store(out_ptr + token * num_out + row, out.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(unspecialised=["num_tokens"])
def _product(
    x_ptr, delta_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, parts_ptr, counter_ptr,
    num_tokens, num_out, x_row, delta_row, eps,
    width: tl.constexpr, tokens: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, part_width: tl.constexpr,
    split: tl.constexpr, stages: tl.constexpr, swap: tl.constexpr, has_norm: tl.constexpr, has_delta: tl.constexpr,
    has_bias: tl.constexpr, gated: tl.constexpr, overlap: tl.constexpr, lines: tl.constexpr, per_line: tl.constexpr,
):  # fmt: skip
    """A tile of outputs, or the part of its sums that some columns of the weights contribute."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row, token = tile * rows + tl.arange(0, rows), tl.arange(0, tokens)
    in_rows = row < num_out
    row_at = weight_ptr + row.to(tl.int64)[:, None] * width
    up_at = row_at + num_out.to(tl.int64) * width
    begin(overlap)
    if lines > 0:
        ahead = part * part_width + tl.arange(0, lines)[None, :] * per_line
        prefetch(row_at + ahead, in_rows[:, None] & (ahead < width))
        if gated:
            prefetch(up_at + ahead, in_rows[:, None] & (ahead < width))
    wait_for_inputs(overlap)
    shape: tl.constexpr = [rows, tokens] if swap else [tokens, rows]
    total = tl.zeros(shape, tl.float32)
    up_total = tl.zeros(shape, tl.float32)
    squares = tl.zeros([tokens], tl.float32)
    for start in tl.range(part * part_width, tl.minimum((part + 1) * part_width, width), block, num_stages=stages):
        column = start + tl.arange(0, block)
        mask = in_rows[:, None] & (column < width)[None, :]
        weight = tl.load(row_at + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x, square = _inputs(
            x_ptr, delta_ptr, norm_ptr, sum_ptr, token, column, num_tokens, x_row, delta_row, tile,
            width, has_norm, has_delta, weight_ptr.dtype.element_ty,
        )  # fmt: skip
        total = _multiplied(x, weight, total, swap)
        if has_norm:
            squares += square
        if gated:
            up = tl.load(up_at + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            up_total = _multiplied(x, up, up_total, swap)
    nearly_done(overlap)
    if split > 1:
        total, is_last = _collected(total, parts_ptr, counter_ptr, tile, part, split, tokens * rows)
        num_tokens = tl.where(is_last, num_tokens, 0)
    scale = tl.full([tokens], 1.0, tl.float32)
    if has_norm:
        scale = tl.rsqrt(squares / width + eps)
    if swap:
        mask = in_rows[:, None] & (token < num_tokens)[None, :]
        _finish(
            total, up_total, scale[None, :], bias_ptr, out_ptr, token[None, :], row[:, None], mask, num_out,
            has_bias, gated,
        )  # fmt: skip
    else:
        mask = (token < num_tokens)[:, None] & in_rows[None, :]
        _finish(
            total, up_total, scale[:, None], bias_ptr, out_ptr, token[:, None], row[None, :], mask, num_out,
            has_bias, gated,
        )  # fmt: skip


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    choice: Choice,
    counters: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + delta) projected by the weight, x + delta) of a few rows; counters are zeros, one per tile.

    The projection is in the dtype of the weight, or in `dtype`.
    """
    num_tokens, width = x.shape
    num_out = weight.shape[0] // (2 if gated else 1)
    out = torch.empty((num_tokens, num_out), dtype=dtype or weight.dtype, device=x.device)
    total = x if delta is None else torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    tiles, tokens = ceil_div(num_out, choice.rows), max(16, next_power_of_two(num_tokens))
    blocks = ceil_div(width, choice.block)
    can_split = norm is None and not gated and tiles <= counters.numel()
    split = min(choice.split, blocks) if can_split else 1
    parts = out if split == 1 else torch.empty((tiles, split, tokens * choice.rows), device=x.device)
    per_line = LINE.value // weight.element_size()
    part_width = ceil_div(blocks, split) * choice.block
    ahead = min(choice.ahead, part_width, width) // per_line
    _product[(tiles, split)](
        x, x if delta is None else delta, weight if norm is None else norm.weight, weight,
        weight if bias is None else bias, out, total, parts, counters,
        num_tokens, num_out, x.stride(0), x.stride(0) if delta is None else delta.stride(0),
        0.0 if norm is None else norm.eps,
        width=width, tokens=tokens, rows=choice.rows, block=choice.block, part_width=part_width,
        split=split, stages=choice.stages, swap=choice.swap, has_norm=norm is not None,
        has_delta=delta is not None, has_bias=bias is not None, gated=gated, overlap=code(choice.overlap),
        lines=next_power_of_two(ahead) if ahead else 0, per_line=per_line,
        num_warps=choice.warps, **dependent(choice.overlap),
    )  # fmt: skip
    return out, total
