"""Vector products: a weight matrix times one vector, bound by reading the weights, so everything else rides along; or
times a few vectors, where a model is so small that launches bound its steps.

The norm is linear but for its scale: out = scale · W (x · weight), and the scale is known when the sum is. So the
squares are summed while the weights stream past, and no program waits for a pass over x first.
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
from phonograph.engine.ops.tuning import STREAMED, Choice
from phonograph.sizes import ceil_div, next_power_of_two


@triton.jit
def _input(
    x_ptr, delta_ptr, norm_ptr, sum_ptr, at, inside, program,
    width: tl.constexpr, has_norm: tl.constexpr, has_delta: tl.constexpr,
):  # fmt: skip
    """(what the weights are multiplied with, its elements before the norm's weight), in float32."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if has_delta:
        x = (x.to(tl.float32) + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + at, x, mask=at < tl.where(program == 0, width, 0))
    kept = x.to(tl.float32)
    wide = kept
    if has_norm:
        wide = kept * tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return wide, kept


@triton.jit
def _finish(
    total, up_total, scale, bias_ptr, out_ptr, row, inside, has_bias: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Scale, bias or gate, and the store of some outputs."""
    out = total * scale
    if has_bias:
        out += tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if gated:
        out = out * tl.sigmoid(out) * (up_total * scale)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch_rows(weight_ptr, row, inside, width: tl.constexpr, lines: tl.constexpr, per_line: tl.constexpr):
    """The first `lines` cache lines of every row."""
    column = tl.arange(0, lines) * per_line
    mask = inside[:, None] & (column < width)[None, :]
    prefetch(weight_ptr + row.to(tl.int64)[:, None] * width + column[None, :], mask)


@triton.jit
def _tile(weight_ptr, tile, num_out, first_row, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr):
    """A tile of whole rows; zeros after the last."""
    row, column = tile * rows + tl.arange(0, rows), tl.arange(0, block)[None, :]
    mask = (row < num_out)[:, None] & (column < width)
    at = (first_row + row).to(tl.int64)[:, None] * width + column
    return tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")


@kernel()
def _streamed(
    x_ptr, delta_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_out, eps,
    width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
    has_norm: tl.constexpr, has_delta: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
    overlap: tl.constexpr, lines: tl.constexpr, per_line: tl.constexpr,
):  # fmt: skip
    """As `_whole`, with the next tile always on its way into registers: the first before x is even there."""
    first, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, block)[None, :]
    begin(overlap)
    weight = _tile(weight_ptr, first, num_out, 0, width, rows, block)
    up = weight
    if gated:
        up = _tile(weight_ptr, first, num_out, num_out, width, rows, block)
    wait_for_inputs(overlap)
    x, kept = _input(x_ptr, delta_ptr, norm_ptr, sum_ptr, column, column < width, first, width, has_norm, has_delta)
    scale = 1.0
    if has_norm:
        scale = tl.rsqrt(tl.sum(kept * kept) / width + eps)
    for tile in range(first, tl.cdiv(num_out, rows), num_programs):
        next_weight = _tile(weight_ptr, tile + num_programs, num_out, 0, width, rows, block)
        next_up = next_weight
        if gated:
            next_up = _tile(weight_ptr, tile + num_programs, num_out, num_out, width, rows, block)
        total = tl.sum(weight.to(tl.float32) * x, 1)
        up_total = total
        if gated:
            up_total = tl.sum(up.to(tl.float32) * x, 1)
        row = tile * rows + tl.arange(0, rows)
        _finish(total, up_total, scale, bias_ptr, out_ptr, row, row < num_out, has_bias, gated)
        weight, up = next_weight, next_up
    nearly_done(overlap)


@kernel()
def _whole(
    x_ptr, delta_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_out, eps,
    width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
    has_norm: tl.constexpr, has_delta: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
    overlap: tl.constexpr, lines: tl.constexpr, per_line: tl.constexpr,
):  # fmt: skip
    """The whole vector in registers; tiles of whole rows of the weights stream past it, every G-th of G programs."""
    first, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, block)[None, :]
    inside = column < width
    begin(overlap)
    if lines > 0:
        row = first * rows + tl.arange(0, rows)
        _prefetch_rows(weight_ptr, row, row < num_out, width, lines, per_line)
        if gated:
            _prefetch_rows(weight_ptr, row + num_out, row < num_out, width, lines, per_line)
    wait_for_inputs(overlap)
    x, kept = _input(x_ptr, delta_ptr, norm_ptr, sum_ptr, column, inside, first, width, has_norm, has_delta)
    scale = 1.0
    if has_norm:
        scale = tl.rsqrt(tl.sum(kept * kept) / width + eps)
    for tile in tl.range(first, tl.cdiv(num_out, rows), num_programs, num_stages=stages):
        weight = _tile(weight_ptr, tile, num_out, 0, width, rows, block)
        total = tl.sum(weight.to(tl.float32) * x, 1)
        up_total = total
        if gated:
            up_total = tl.sum(_tile(weight_ptr, tile, num_out, num_out, width, rows, block).to(tl.float32) * x, 1)
        row = tile * rows + tl.arange(0, rows)
        _finish(total, up_total, scale, bias_ptr, out_ptr, row, row < num_out, has_bias, gated)
    nearly_done(overlap)


@kernel()
def _blocked(
    x_ptr, delta_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_out, eps,
    width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
    has_norm: tl.constexpr, has_delta: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
    overlap: tl.constexpr, lines: tl.constexpr, per_line: tl.constexpr,
):  # fmt: skip
    """Some rows of the weights per program, block by block of their columns."""
    first = tl.program_id(0)
    row = first * rows + tl.arange(0, rows)
    in_rows = row < num_out
    row_at = row.to(tl.int64)[:, None] * width
    begin(overlap)
    if lines > 0:
        _prefetch_rows(weight_ptr, row, in_rows, width, lines, per_line)
        if gated:
            _prefetch_rows(weight_ptr, row + num_out, in_rows, width, lines, per_line)
    wait_for_inputs(overlap)
    total = tl.zeros([rows, block], tl.float32)
    up_total = tl.zeros([rows, block], tl.float32)
    squares = tl.zeros([1, block], tl.float32)
    for start in tl.range(0, width, block, num_stages=stages):
        column = start + tl.arange(0, block)[None, :]
        inside = column < width
        mask = in_rows[:, None] & inside
        weight = tl.load(weight_ptr + row_at + column, mask=mask, other=0.0, eviction_policy="evict_first")
        x, kept = _input(x_ptr, delta_ptr, norm_ptr, sum_ptr, column, inside, first, width, has_norm, has_delta)
        total += weight.to(tl.float32) * x
        if has_norm:
            squares += kept * kept
        if gated:
            at = weight_ptr + num_out.to(tl.int64) * width + row_at + column
            up_total += tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x
    nearly_done(overlap)
    scale = 1.0
    if has_norm:
        scale = tl.rsqrt(tl.sum(squares) / width + eps)
    _finish(tl.sum(total, 1), tl.sum(up_total, 1), scale, bias_ptr, out_ptr, row, in_rows, has_bias, gated)


@triton.jit
def _vectors(
    x_ptr, delta_ptr, sum_ptr, num_tokens, x_stride, delta_stride, sum_stride, program,
    tokens: tl.constexpr, width: tl.constexpr, block: tl.constexpr, has_delta: tl.constexpr,
):  # fmt: skip
    """Some rows of x, with their deltas added; all before the first is used, so that they come at once."""
    column = tl.arange(0, block)[None, :]
    found = ()
    for token in tl.static_range(tokens):
        count = tl.where(token < num_tokens, width, 0)
        mask = column < count
        x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0)
        if has_delta:
            delta = tl.load(delta_ptr + token * delta_stride + column, mask=mask, other=0.0)
            x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + token * sum_stride + column, x, mask=column < tl.where(program == 0, count, 0))
        found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton takes no star
    return found


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_four(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, d + other_d


@triton.jit
def _sums(found, count: tl.constexpr):
    """Over the columns of two or four tensors; together, since programs wait for each other's warps in each."""
    return tl.reduce(found, 1, _add_two) if count == 2 else tl.reduce(found, 1, _add_four)


@triton.jit
def _multiplied(
    weight, up, vectors, norm, scales, bias_ptr, out_ptr, row, num_tokens, num_out,
    first_token: tl.constexpr, count: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Some rows of the weights times two or four of the vectors."""
    totals, up_totals = (), ()
    for place in tl.static_range(count):
        x = vectors[first_token + place].to(tl.float32) * norm
        totals = totals + (weight.to(tl.float32) * x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton takes no star
        if gated:
            up_totals = up_totals + (up.to(tl.float32) * x,)  # type: ignore[assignment]  # noqa: RUF005
    totals = _sums(totals, count)
    up_totals = _sums(up_totals, count) if gated else totals
    for place in tl.static_range(count):
        scale, at = scales[first_token + place], out_ptr + (first_token + place) * num_out
        inside = row < tl.where(first_token + place < num_tokens, num_out, 0)
        _finish(totals[place], up_totals[place], scale, bias_ptr, at, row, inside, has_bias, gated)


@triton.jit
def _scales(vectors, eps, width: tl.constexpr, tokens: tl.constexpr, count: tl.constexpr, has_norm: tl.constexpr):
    """What the norm multiplies each vector by."""
    scales = ()
    for group in tl.static_range(tokens // count):
        squares = ()
        for place in tl.static_range(count):
            kept = vectors[group * count + place].to(tl.float32)
            squares = squares + (kept * kept,)  # type: ignore[assignment]  # noqa: RUF005
        if has_norm:
            squares = _sums(squares, count)
        for place in tl.static_range(count):
            scale = 1.0
            if has_norm:
                scale = tl.rsqrt(squares[place] / width + eps)
            scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@kernel()
def _few(
    x_ptr, delta_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_tokens, num_out, eps,
    x_stride, delta_stride, sum_stride,
    tokens: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, dealt: tl.constexpr,
    has_norm: tl.constexpr, has_delta: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """As `_streamed`, with up to `tokens` vectors in registers, which meet the weights two or four at a time."""
    first, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, block)[None, :]
    count: tl.constexpr = min(tokens, 4)
    begin(overlap)
    weight = _tile(weight_ptr, first, num_out, 0, width, rows, block)
    up = weight
    if gated:
        up = _tile(weight_ptr, first, num_out, num_out, width, rows, block)
    norm = 1.0
    if has_norm:
        norm = tl.load(norm_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    wait_for_inputs(overlap)
    vectors = _vectors(
        x_ptr, delta_ptr, sum_ptr, num_tokens, x_stride, delta_stride, sum_stride, first, tokens, width, block,
        has_delta,
    )  # fmt: skip
    scales = _scales(vectors, eps, width, tokens, count, has_norm)
    for tile in range(first, tl.cdiv(num_out, rows), num_programs):
        next_weight, next_up = weight, up
        if dealt:
            next_weight = _tile(weight_ptr, tile + num_programs, num_out, 0, width, rows, block)
            next_up = next_weight
            if gated:
                next_up = _tile(weight_ptr, tile + num_programs, num_out, num_out, width, rows, block)
        row = tile * rows + tl.arange(0, rows)
        for group in tl.static_range(tokens // count):
            if group * count < num_tokens:
                _multiplied(
                    weight, up, vectors, norm, scales, bias_ptr, out_ptr, row, num_tokens, num_out,
                    group * count, count, has_bias, gated,
                )  # fmt: skip
        weight, up = next_weight, next_up
    nearly_done(overlap)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    choice: Choice,
    *,
    delta: torch.Tensor | None = None,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + delta) projected by the weight, x + delta) of x, [1, width], or of a few rows.

    The projection is in the dtype of the weight, or in `dtype`.
    """
    num_out, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty((x.shape[0], num_out), dtype=dtype or weight.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    whole = choice.block >= width
    tiles = ceil_div(num_out, choice.rows)
    if x.shape[0] > 1:
        programs = min(choice.programs or tiles, tiles)
        _few[(programs,)](
            x, x if delta is None else delta, weight if norm is None else norm.weight, weight,
            weight if bias is None else bias, out, total, x.shape[0], num_out, 0.0 if norm is None else norm.eps,
            x.stride(0), x.stride(0) if delta is None else delta.stride(0), total.stride(0),
            tokens=next_power_of_two(x.shape[0]), width=width, rows=choice.rows, block=choice.block,
            dealt=programs < tiles, has_norm=norm is not None, has_delta=delta is not None, has_bias=bias is not None,
            gated=gated, overlap=code(choice.overlap), num_warps=choice.warps, **dependent(choice.overlap),
        )  # fmt: skip
        return out, total
    chosen = (_streamed if choice.stages == STREAMED else _whole) if whole else _blocked
    per_line = LINE.value // weight.element_size()
    ahead = min(choice.ahead, width) // per_line
    chosen[(min(choice.programs, tiles) if whole and choice.programs else tiles,)](
        x, x if delta is None else delta, weight if norm is None else norm.weight, weight,
        weight if bias is None else bias, out, total, num_out, 0.0 if norm is None else norm.eps,
        width=width, rows=choice.rows, block=choice.block, stages=choice.stages,
        has_norm=norm is not None, has_delta=delta is not None, has_bias=bias is not None, gated=gated,
        overlap=code(choice.overlap), lines=next_power_of_two(ahead) if ahead else 0, per_line=per_line,
        num_warps=choice.warps, **dependent(choice.overlap),
    )  # fmt: skip
    return out, total
