"""Rotation: norm and rotation of queries and keys, and the write of keys and values into their pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.kernels import Heads, Places
from phonograph.engine.ops.triton.dependent_launch import begin, code, dependent, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Overlap
from phonograph.sizes import ceil_div, next_power_of_two


@triton.jit
def _scaled(low, high, weight_ptr, half, inside, eps, head_dim: tl.constexpr):
    """Both halves of heads after their norm; what is outside a head is zero and stays so."""
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    scale = tl.rsqrt(squares / head_dim + eps)[:, None]
    low_weight = tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
    high_weight = tl.load(weight_ptr + head_dim // 2 + half, mask=inside, other=0.0).to(tl.float32)
    return low * scale * low_weight[None, :], high * scale * high_weight[None, :]


@kernel()
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    slots_ptr, keys_ptr, values_ptr, out_ptr, qkv_row, slot_stride, head_stride, q_eps, k_eps,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, half_columns: tl.constexpr,
    block: tl.constexpr, has_norm: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; a head is held as its two halves, which the rotation mixes."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block + tl.arange(0, block)
    half = tl.arange(0, half_columns)
    inside = half < head_dim // 2
    is_query, is_value = head < num_heads, head >= num_heads + num_kv_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    mask = (head < num_heads + 2 * num_kv_heads)[:, None] & inside[None, :]
    begin(overlap)
    wait_for_inputs(overlap)
    slot = tl.load(slots_ptr + token)
    at = qkv_ptr + token * qkv_row + head[:, None] * head_dim + half[None, :]
    kept_low = tl.load(at, mask=mask, other=0.0)
    kept_high = tl.load(at + head_dim // 2, mask=mask, other=0.0)
    low, high = kept_low.to(tl.float32), kept_high.to(tl.float32)
    if has_norm:
        q_low, q_high = _scaled(low, high, q_weight_ptr, half, inside, q_eps, head_dim)
        k_low, k_high = _scaled(low, high, k_weight_ptr, half, inside, k_eps, head_dim)
        low = tl.where(is_query[:, None], q_low, k_low)
        high = tl.where(is_query[:, None], q_high, k_high)
    angle = token * head_dim + half
    cos_low = tl.load(cos_ptr + angle, mask=inside, other=0.0)[None, :]
    sin_low = tl.load(sin_ptr + angle, mask=inside, other=0.0)[None, :]
    cos_high = tl.load(cos_ptr + angle + head_dim // 2, mask=inside, other=0.0)[None, :]
    sin_high = tl.load(sin_ptr + angle + head_dim // 2, mask=inside, other=0.0)[None, :]
    turned_low = (low * cos_low + high * sin_low).to(kept_low.dtype)
    turned_high = (high * cos_high + low * sin_high).to(kept_low.dtype)
    q_at = out_ptr + (token * num_heads + head[:, None]) * head_dim + half[None, :]
    tl.store(q_at, turned_low, mask=mask & is_query[:, None])
    tl.store(q_at + head_dim // 2, turned_high, mask=mask & is_query[:, None])
    place = slot * slot_stride
    k_at = keys_ptr + place + (head - num_heads)[:, None] * head_stride + half[None, :]
    tl.store(k_at, turned_low, mask=mask & is_key[:, None])
    tl.store(k_at + head_dim // 2, turned_high, mask=mask & is_key[:, None])
    v_at = values_ptr + place + (head - num_heads - num_kv_heads)[:, None] * head_stride + half[None, :]
    tl.store(v_at, kept_low, mask=mask & is_value[:, None])
    tl.store(v_at + head_dim // 2, kept_high, mask=mask & is_value[:, None])


def rotate_and_store(
    qkv: torch.Tensor,
    heads: Heads,
    places: Places,
    cache: PagedCache,
    layer: int,
    out: torch.Tensor | None = None,
    *,
    overlap: Overlap = "none",
) -> torch.Tensor:
    """The queries, [num_tokens, num_heads, head_dim]."""
    num_tokens, total = qkv.shape[0], heads.num_heads + 2 * heads.num_kv_heads
    if out is None:
        out = torch.empty((num_tokens, heads.num_heads, heads.head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    keys, values = cache.layers[layer]
    q_norm, k_norm = heads.q_norm, heads.k_norm
    # Few tokens: small programs on many multiprocessors. Many: larger ones, which cost less to start.
    block = 1 if num_tokens <= 4 else 4 if num_tokens <= 64 else 16
    _rotate_and_store[(num_tokens, ceil_div(total, block))](
        qkv, places.cos, places.sin,
        q_norm.weight if q_norm is not None else qkv, k_norm.weight if k_norm is not None else qkv,
        places.slots, keys, values, out, qkv.stride(0), keys.stride(1), keys.stride(2),
        q_norm.eps if q_norm is not None else 0.0, k_norm.eps if k_norm is not None else 0.0,
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
        half_columns=next_power_of_two(heads.head_dim // 2), block=block,
        has_norm=q_norm is not None and k_norm is not None, overlap=code(overlap),
        num_warps=4 if block == 16 else 1, **dependent(overlap),
    )  # fmt: skip
    return out
