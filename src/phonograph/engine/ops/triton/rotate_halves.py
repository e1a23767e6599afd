"""Rotation kernel for layers of transformers: queries and keys in one launch, with the roundings of torch's ops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.engine.ops.triton.dependent_launch import begin, code, dependent, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Overlap
from phonograph.sizes import ceil_div, next_power_of_two

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 1024
_TILE = 1024
"""Elements of a program, about."""


@triton.jit
def _product(x, y):
    """As an op rounds it, in float32."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, head, num_heads, x_head, out_head, half, inside, cos_low, sin_low, cos_high, sin_high, width
):  # fmt: skip
    """Some heads of one token, whose first head is at the pointers."""
    mask = (head < num_heads)[:, None] & inside
    head = head.to(tl.int64)[:, None]
    x = x_ptr + head * x_head + half
    out = out_ptr + head * out_head + half
    low = tl.load(x, mask=mask, other=0.0)
    high = tl.load(x + width, mask=mask, other=0.0)
    turned_low = _product(low, cos_low) - _product(high, sin_low)
    turned_high = _product(high, cos_high) + _product(low, sin_high)
    tl.store(out, turned_low.to(low.dtype), mask=mask)
    tl.store(out + width, turned_high.to(low.dtype), mask=mask)


@kernel()
def _rotate_halves(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    num_heads, num_kv_heads, q_blocks, cos_row, sin_row,
    q_token, q_head, k_token, k_head, q_out_token, q_out_head, k_out_token, k_out_head,
    width: tl.constexpr, columns: tl.constexpr, heads: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """A block of the heads of queries, or of keys, of one token. `width` is that of half a head."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, columns)[None, :]
    inside = half < width
    begin(overlap)
    wait_for_inputs(overlap)
    cos, sin = cos_ptr + token * cos_row + half, sin_ptr + token * sin_row + half
    cos_low = tl.load(cos, mask=inside, other=0.0)
    sin_low = tl.load(sin, mask=inside, other=0.0)
    cos_high = tl.load(cos + width, mask=inside, other=0.0)
    sin_high = tl.load(sin + width, mask=inside, other=0.0)
    if block < q_blocks:
        head = block * heads + tl.arange(0, heads)
        _rotate_heads(
            q_ptr + token * q_token, q_out_ptr + token * q_out_token, head, num_heads, q_head, q_out_head,
            half, inside, cos_low, sin_low, cos_high, sin_high, width,
        )  # fmt: skip
    else:
        head = (block - q_blocks) * heads + tl.arange(0, heads)
        _rotate_heads(
            k_ptr + token * k_token, k_out_ptr + token * k_out_token, head, num_kv_heads, k_head, k_out_head,
            half, inside, cos_low, sin_low, cos_high, sin_high, width,
        )  # fmt: skip


def rotate_halves(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, overlap: Overlap = "none"
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `RotatesHalves.rotate_halves`."""
    if not _is_known(q, k, cos, sin):
        return None
    _, num_heads, num_tokens, head_dim = q.shape
    turned, keys = torch.empty_like(q), torch.empty_like(k)
    if turned.stride(-1) != 1 or keys.stride(-1) != 1:
        return None
    if num_tokens:
        columns = next_power_of_two(head_dim // 2)
        heads = max(1, _TILE // (2 * columns))
        heads = min(heads, next_power_of_two(num_heads))
        q_blocks, k_blocks = ceil_div(num_heads, heads), ceil_div(k.shape[1], heads)
        strides = [one.stride(dim) for one in (q, k, turned, keys) for dim in (2, 1)]
        _rotate_halves[(num_tokens, q_blocks + k_blocks)](
            q, k, cos, sin, turned, keys, num_heads, k.shape[1], q_blocks, cos.stride(1), sin.stride(1), *strides,
            width=head_dim // 2, columns=columns, heads=heads, overlap=code(overlap), num_warps=4,
            enable_fp_fusion=False, **dependent(overlap),
        )  # fmt: skip
    return turned, keys


def _is_known(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    if q.ndim != 4 or k.ndim != 4 or q.dtype not in _DTYPES:
        return False
    _, _, num_tokens, head_dim = q.shape
    shapes = (1, k.shape[1], num_tokens, head_dim), (1, num_tokens, head_dim), (1, num_tokens, head_dim)
    return (
        q.shape[0] == 1
        and (k.shape, cos.shape, sin.shape) == shapes
        and 0 < head_dim <= _WIDEST
        and head_dim % 2 == 0
        and all(one.dtype == q.dtype and one.device == q.device and one.stride(-1) == 1 for one in (q, k, cos, sin))
    )
