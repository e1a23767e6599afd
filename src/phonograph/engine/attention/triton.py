"""Attention in Triton: one kernel for decode and prefill, whose grid depends on the number of tokens alone.

Lengths and pages are read from device memory, so a recording serves any number of requests of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from phonograph.engine.attention.base import PagedCache, Queries, StepAttention

_BLOCK = 64


@triton.jit
def _attend(
    q_ptr, keys_ptr, values_ptr, rows_ptr, positions_ptr, table_ptr, out_ptr,
    scale, window,
    q_token, q_head, table_row, page_stride, slot_stride, head_stride,
    page_size: tl.constexpr, group: tl.constexpr, group_rows: tl.constexpr, head_dim: tl.constexpr,
    dim_columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One token and one KV head: its group of query heads against all pages up to the token's position."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    rows, columns, places = tl.arange(0, group_rows), tl.arange(0, dim_columns), tl.arange(0, block)
    in_head = columns < head_dim
    q_mask = (rows < group)[:, None] & in_head[None, :]
    q_at = token * q_token + (kv_head * group + rows[:, None]) * q_head + columns[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    position = tl.load(positions_ptr + token)
    pages_ptr = table_ptr + tl.load(rows_ptr + token) * table_row
    best = tl.full([group_rows], float("-inf"), tl.float32)
    total = tl.zeros([group_rows], tl.float32)
    mixed = tl.zeros([group_rows, dim_columns], tl.float32)
    first = tl.maximum(position - window + 1, 0) // block * block
    for start in range(first, position + 1, block):
        at = start + places
        seen = (at <= position) & (at > position - window)
        page = tl.load(pages_ptr + at // page_size, mask=seen, other=0).to(tl.int64)
        base = page * page_stride + (at % page_size) * slot_stride + kv_head * head_stride
        mask = seen[:, None] & in_head[None, :]
        k = tl.load(keys_ptr + base[:, None] + columns[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(best - higher)
        v = tl.load(values_ptr + base[:, None] + columns[None, :], mask=mask, other=0.0)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    out_at = (token * tl.num_programs(1) * group + kv_head * group + rows[:, None]) * head_dim + columns[None, :]
    tl.store(out_ptr + out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


class TritonAttention:
    """Paged attention for GPUs; correct, and not yet tuned."""

    name = "triton"

    def prepare(self, cache: PagedCache, queries: Queries) -> StepAttention:
        return _TritonStep(cache, queries)


@dataclass(frozen=True)
class _TritonStep:
    """The kernel reads everything from the queries."""

    cache: PagedCache
    queries: Queries

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        queries, keys, values = self.queries, self.cache.keys[layer], self.cache.values[layer]
        group = num_heads // keys.shape[2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if num_tokens == 0:
            return out
        _attend[(num_tokens, keys.shape[2])](
            q, keys, values, queries.rows, queries.positions, queries.table, out,
            head_dim**-0.5, window if window is not None else 1 << 30,
            q.stride(0), q.stride(1), queries.table.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
            page_size=self.cache.page_size, group=group, group_rows=max(16, triton.next_power_of_2(group)),
            head_dim=head_dim, dim_columns=max(16, triton.next_power_of_2(head_dim)), block=_BLOCK,
        )  # fmt: skip
        return out
