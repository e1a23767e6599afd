"""Attention kernel: tiles of queries against the pages of their sequence, with an online softmax.

A tile is some tokens of one sequence times the query heads of one KV head, packed into the rows of one matrix: row r is
token r // group_rows and head r % group_rows. The keys of a tile may be cut into parts that different programs walk;
the last of them to arrive merges, in the order of the parts. Lengths, pages and tiles are read from device memory and
the grid is (kv_heads, splits, tiles), so a recording serves any number of requests of any length.

In a decode step the kernel can take the projections as they come: it norms and rotates its queries itself, and the
program with the last keys does so with the token's own key, which it attends from registers and writes to its page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phonograph.engine.ops.triton.dependent_launch import begin, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel

SMALL_ROWS = tl.constexpr(16)
"""The fewest rows that the matrix units take: what a tile of few tokens is computed with."""
LARGE_ROWS = tl.constexpr(64)
"""From this many rows on, tiles of few tokens are computed with fewer."""
LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1e30)
"""The best score of a row that has seen no key yet; finite, so that the difference of two of them is no NaN."""


@kernel(unspecialised=["num_tokens"])
def attend(
    q_ptr, keys_ptr, values_ptr, table_ptr, rows_ptr, positions_ptr, tiles_ptr, out_ptr,
    parts_ptr, arrived_ptr, cos_ptr, sin_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr,
    q_eps, k_eps, scale, bend, softcap, window, part_keys, num_tokens, q_token, q_head, table_row,
    page_stride, slot_stride, head_stride,
    page_size: tl.constexpr, group: tl.constexpr, group_rows: tl.constexpr, head_dim: tl.constexpr,
    dim_columns: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, splits: tl.constexpr,
    tiled: tl.constexpr, windowed: tl.constexpr, wide: tl.constexpr, apart: tl.constexpr,
    rotating: tl.constexpr, has_norm: tl.constexpr, softcapped: tl.constexpr, has_sinks: tl.constexpr,
    by_row: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One part of one tile for one KV head. `scale` is what scores are multiplied by before exp2.

    Without a softcap scores are plain products, and `scale` is the softmax scale times log2(e). With one, products are
    multiplied by `bend` and bent by a tanh to be at most `softcap`, and `scale` is log2(e).

    Rotating, q_ptr has the queries, keys and values of every token, and tiles are single tokens.
    """
    kv_head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin(overlap)
    wait_for_inputs(overlap)
    first, count, row, position = _tile(tiles_ptr, rows_ptr, positions_ptr, tile, tiled, by_row)
    start, stop, parts = _part(position, count, window, part_keys, split, block_n, splits, windowed)
    if split >= parts:
        return
    kv_heads, out_token = tl.num_programs(0), tl.num_programs(0) * (group * head_dim)
    out_ptr += first.to(tl.int64) * out_token + kv_head * (group * head_dim)
    if row == 0:
        nothing = tl.zeros([block_m, dim_columns], tl.float32)
        _write(out_ptr, nothing, out_token, count, group, group_rows, head_dim, dim_columns, block_m)
        return
    pages = (
        keys_ptr + kv_head * head_stride, values_ptr + kv_head * head_stride,
        table_ptr + row.to(tl.int64) * table_row, page_stride, slot_stride,
    )  # fmt: skip
    q_ptr += first.to(tl.int64) * q_token
    queries = (q_ptr + kv_head * group * q_head, q_token, q_head)
    raw = (
        q_ptr + (kv_heads * group + kv_head) * q_head, q_ptr + (kv_heads * (group + 1) + kv_head) * q_head,
        cos_ptr + first.to(tl.int64) * head_dim, sin_ptr + first.to(tl.int64) * head_dim, slots_ptr + first,
        q_norm_ptr, k_norm_ptr, q_eps, k_eps,
    )  # fmt: skip
    left = _left(parts_ptr, kv_head, first, num_tokens, group_rows, dim_columns, splits)
    result = (out_ptr, out_token, left[0], left[1], left[2], arrived_ptr + tile * kv_heads + kv_head, left[3])
    span = (count, position, start, stop, split, parts)
    scales = (scale, bend, softcap, sinks_ptr + kv_head * group)
    small: tl.constexpr = tiled and block_m >= LARGE_ROWS and group_rows <= SMALL_ROWS
    if small and count * group_rows <= SMALL_ROWS:
        _attend_rows(
            queries, raw, pages, result, span, scales, window, page_size, group, group_rows, head_dim, dim_columns,
            SMALL_ROWS, SMALL_ROWS, block_n, splits, windowed, wide, False, False, False, softcapped, has_sinks,
        )  # fmt: skip
    else:
        _attend_rows(
            queries, raw, pages, result, span, scales, window, page_size, group, group_rows, head_dim, dim_columns,
            block_m, block_m if tiled else group_rows, block_n, splits, windowed, wide, apart and not windowed,
            rotating, has_norm, softcapped, has_sinks,
        )  # fmt: skip


@triton.jit
def _tile(tiles_ptr, rows_ptr, positions_ptr, tile, tiled: tl.constexpr, by_row: tl.constexpr):
    """First token, number of tokens, row and first position."""
    if tiled:
        first, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
        row, position = tl.load(tiles_ptr + tile * 4 + 2), tl.load(tiles_ptr + tile * 4 + 3)
    else:
        first, count = tile, tl.full([], 1, tl.int32)
        row = tl.load(rows_ptr + tile).to(tl.int32)
        position = tl.load(positions_ptr + (row if by_row else tile)).to(tl.int32)
    return first, count, row, position


@triton.jit
def _left(
    parts_ptr, kv_head, first, num_tokens, group_rows: tl.constexpr, dim_columns: tl.constexpr, splits: tl.constexpr
):  # fmt: skip
    """Where the parts of a tile are left: values, best scores, totals; and how many rows lie between two parts.

    Each part has a plane of rows, and those of a tile stand where its tokens stand. Behind all values come the scores.
    """
    plane, place = num_tokens * group_rows, (kv_head * splits * num_tokens + first) * group_rows
    all_rows = tl.cast(tl.num_programs(0) * splits * plane, tl.int64)
    bests_ptr = parts_ptr + all_rows * dim_columns + place
    return parts_ptr + tl.cast(place, tl.int64) * dim_columns, bests_ptr, bests_ptr + all_rows, plane


@triton.jit
def _part(
    position, count, window, part_keys, split,
    block_n: tl.constexpr, splits: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """The keys of this part, [start, stop), and the number of parts; there is none where there are no tokens.

    Parts are whole blocks and none is empty; but for the last, each has `part_keys` keys or more.
    """
    end = position + count
    blocks, first_block = tl.cdiv(end, block_n), 0
    if windowed:
        first_block = tl.maximum(position - window + 1, 0) // block_n
        blocks -= first_block
    share = tl.maximum(tl.maximum(tl.cdiv(blocks, splits), part_keys // block_n), 1)
    start = (first_block + split * share) * block_n
    return start, tl.minimum(start + share * block_n, end), tl.where(count > 0, tl.cdiv(blocks, share), 0)


@triton.jit
def _attend_rows(
    queries, raw, pages, result, span, scales, window,
    page_size: tl.constexpr, group: tl.constexpr, group_rows: tl.constexpr, head_dim: tl.constexpr,
    dim_columns: tl.constexpr, num_rows: tl.constexpr, kept_rows: tl.constexpr, block_n: tl.constexpr,
    splits: tl.constexpr, windowed: tl.constexpr, wide: tl.constexpr, apart: tl.constexpr, rotating: tl.constexpr,
    has_norm: tl.constexpr, softcapped: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """Walk a part's keys with `num_rows` rows; write the result, or leave `kept_rows` of it for the last to arrive."""
    q_ptr, q_token, q_head = queries
    count, position, start, stop, split, parts = span
    rows, columns = tl.arange(0, num_rows), tl.arange(0, dim_columns)
    tokens, heads = rows // group_rows, rows % group_rows
    mask = ((tokens < count) & (heads < group))[:, None] & (columns < head_dim)[None, :]
    q_ptrs = q_ptr + tokens[:, None] * q_token + heads[:, None] * q_head
    best = tl.full([num_rows], UNSEEN, tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    mixed = tl.zeros([num_rows, dim_columns], tl.float32)
    if rotating:
        q = _turned(q_ptrs, mask, columns, raw[2], raw[3], raw[5], raw[7], head_dim, has_norm)
        if split == parts - 1:
            best, total, mixed = _own(q, pages, raw, columns, head_dim, num_rows, has_norm)
        # Its own key is dealt with: what it walks are the keys that the token before it saw.
        stop, position, window = tl.minimum(stop, position), position - 1, window - 1
    else:
        q = tl.load(q_ptrs + columns[None, :], mask=mask, other=0.0)
    best, total, mixed = _walk(
        q, (best, total, mixed), pages, (count, position, start, stop), tokens, scales, window,
        page_size, head_dim, dim_columns, block_n, windowed, wide, apart, softcapped,
    )  # fmt: skip
    if splits == 1 or parts == 1:
        if has_sinks:
            total, mixed = _sunk(best, total, mixed, scales, group, group_rows, num_rows)
        mixed = mixed / _divisor(total)[:, None]
        _write(result[0], mixed, result[1], count, group, group_rows, head_dim, dim_columns, num_rows)
    else:
        _leave(result, best, total, mixed, split, count * group_rows, dim_columns, num_rows)
        if _is_last(result[5], parts):
            _merge(result, parts, count, scales, group, group_rows, head_dim, dim_columns, kept_rows, splits, has_sinks)


@triton.jit
def _turned(
    row_ptrs, mask, columns, cos_ptr, sin_ptr, norm_ptr, eps, head_dim: tl.constexpr, has_norm: tl.constexpr
):  # fmt: skip
    """Heads of a token, normed and rotated; each column is mixed with its partner in the other half."""
    inside = columns < head_dim
    partner = tl.where(columns < head_dim // 2, columns + head_dim // 2, columns - head_dim // 2)
    kept = tl.load(row_ptrs + columns[None, :], mask=mask, other=0.0)
    mine = kept.to(tl.float32)
    other = tl.load(row_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        scale = tl.rsqrt(tl.sum(mine * mine, 1) / head_dim + eps)[:, None]
        mine = mine * scale * tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        other = other * scale * tl.load(norm_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(cos_ptr + columns, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + columns, mask=inside, other=0.0)[None, :]
    return (mine * cos + other * sin).to(kept.dtype)


@triton.jit
def _own(q, pages, raw, columns, head_dim: tl.constexpr, num_rows: tl.constexpr, has_norm: tl.constexpr):
    """What a token has seen once it has seen itself: best score, total, values. Its key and value go to their page."""
    k_ptr, v_ptr, cos_ptr, sin_ptr, slot_ptr, _, k_norm_ptr, _, k_eps = raw
    inside = (columns < head_dim)[None, :]
    one = tl.zeros([1, 1], tl.int32)
    k = _turned(k_ptr + one, inside, columns, cos_ptr, sin_ptr, k_norm_ptr, k_eps, head_dim, has_norm)
    v = tl.load(v_ptr + one + columns[None, :], mask=inside, other=0.0)
    place = tl.load(slot_ptr) * pages[4]
    tl.store(pages[0] + place + one + columns[None, :], k, mask=inside)
    tl.store(pages[1] + place + one + columns[None, :], v, mask=inside)
    best = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    mixed = tl.zeros([num_rows, 1], tl.float32) + v.to(tl.float32)
    return best, tl.full([num_rows], 1.0, tl.float32), mixed


@triton.jit
def _walk(
    q, state, pages, span, tokens, scales, window,
    page_size: tl.constexpr, head_dim: tl.constexpr, dim_columns: tl.constexpr, block_n: tl.constexpr,
    windowed: tl.constexpr, wide: tl.constexpr, apart: tl.constexpr, softcapped: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys of the part; `apart`, blocks that every token sees whole in a loop of their own."""
    _, position, start, stop = span
    if apart:
        edge = start + tl.maximum(tl.minimum(position + 1, stop) - start, 0) // block_n * block_n
        state = _blocks(
            q, state, pages, span, start, edge, tokens, scales, window,
            page_size, head_dim, dim_columns, block_n, windowed, wide, False, softcapped,
        )  # fmt: skip
        start = edge
    return _blocks(
        q, state, pages, span, start, stop, tokens, scales, window,
        page_size, head_dim, dim_columns, block_n, windowed, wide, True, softcapped,
    )  # fmt: skip


@triton.jit
def _blocks(
    q, state, pages, span, first_key, stop, tokens, scales, window,
    page_size: tl.constexpr, head_dim: tl.constexpr, dim_columns: tl.constexpr, block_n: tl.constexpr,
    windowed: tl.constexpr, wide: tl.constexpr, masked: tl.constexpr, softcapped: tl.constexpr,
):  # fmt: skip
    """The keys from `first_key` to `stop`; without masks, all of them are seen by every token."""
    keys_ptr, values_ptr, table_ptr, page_stride, slot_stride = pages
    count, position, _, _ = span
    best, total, mixed = state
    scale = scales[0]
    offsets, columns = tl.arange(0, block_n), tl.arange(0, dim_columns)
    low = position - window if windowed else -1  # keys above it are live
    page = _pages(table_ptr, first_key, low, stop, page_size, block_n)
    for start in range(first_key, stop, block_n):
        at = start + offsets
        live = (at > low) & (at < stop) if windowed else at < stop
        place = (page.to(tl.int64) if wide else page) * page_stride + at % page_size * slot_stride
        # The pages of the next block are loaded one iteration early, so that its keys need not wait for them.
        page = _pages(table_ptr, start + block_n, low, stop, page_size, block_n)
        k = _load(keys_ptr, place, live, columns, head_dim, dim_columns, masked)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if softcapped:
            scores = scales[2] * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scales[1] * scores)))  # tanh
        # Blocks that every token of the tile sees whole need no mask.
        if windowed:
            if (start + block_n > position + 1) | (start <= low + count - 1):
                ages = (position + tokens)[:, None] - at[None, :]
                scores = tl.where((ages >= 0) & (ages < window), scores, float("-inf"))
        # `masked` is known when the kernel is compiled, the rest is not.
        elif masked:  # noqa: SIM102
            if start + block_n > position + 1:
                scores = tl.where(at[None, :] <= (position + tokens)[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores * scale - (higher * scale)[:, None])
        kept = tl.exp2((best - higher) * scale)
        total = total * kept + tl.sum(weights, 1)
        v = _load(values_ptr, place, live, columns, head_dim, dim_columns, masked)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
        best = higher
    return best, total, mixed


@triton.jit
def _pages(table_ptr, start, low, stop, page_size: tl.constexpr, block_n: tl.constexpr):
    """The pages of one block of keys; a single number where one page holds the block. What is not live has page 0."""
    if page_size % block_n == 0:
        page = tl.load(table_ptr + start // page_size, mask=start < stop, other=0)
    else:
        at = start + tl.arange(0, block_n)
        page = tl.load(table_ptr + at // page_size, mask=(at > low) & (at < stop), other=0)
    return page


@triton.jit
def _load(
    cache_ptr, place, live, columns, head_dim: tl.constexpr, dim_columns: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """Keys or values of one block; what is not live reads as zero, whatever is in its page."""
    pointers = cache_ptr + place[:, None] + columns[None, :]
    if not masked and head_dim == dim_columns:
        loaded = tl.load(pointers)
    elif head_dim == dim_columns:
        loaded = tl.load(pointers, mask=live[:, None], other=0.0)
    else:
        loaded = tl.load(pointers, mask=live[:, None] & (columns < head_dim)[None, :], other=0.0)
    return loaded


@triton.jit
def _sunk(best, total, mixed, scales, group: tl.constexpr, group_rows: tl.constexpr, num_rows: tl.constexpr):
    """Totals and values once each head's sink, a score without a value, has been seen too."""
    heads = tl.arange(0, num_rows) % group_rows
    sinks = tl.load(scales[3] + heads, mask=heads < group, other=0.0).to(tl.float32) * LOG2E
    seen = best * scales[0]
    higher = tl.maximum(seen, sinks)
    kept = tl.exp2(seen - higher)
    return total * kept + tl.exp2(sinks - higher), mixed * kept[:, None]


@triton.jit
def _divisor(total):
    """Rows beyond the tile's tokens may have seen nothing."""
    return tl.where(total > 0, total, 1.0)


@triton.jit
def _write(
    out_ptr, mixed, out_token, count,
    group: tl.constexpr, group_rows: tl.constexpr, head_dim: tl.constexpr, dim_columns: tl.constexpr,
    num_rows: tl.constexpr,
):  # fmt: skip
    """The rows of a tile to their places in the output."""
    rows, columns = tl.arange(0, num_rows), tl.arange(0, dim_columns)
    tokens, heads = rows // group_rows, rows % group_rows
    mask = ((tokens < count) & (heads < group))[:, None] & (columns < head_dim)[None, :]
    at = tokens[:, None] * out_token + heads[:, None] * head_dim + columns[None, :]
    tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _leave(
    result, best, total, mixed, split, used_rows, dim_columns: tl.constexpr, num_rows: tl.constexpr
):  # fmt: skip
    """Put a part where the last to arrive finds it."""
    rows, columns = tl.arange(0, num_rows), tl.arange(0, dim_columns)
    at, kept = split * result[6] + rows, rows < used_rows
    tl.store(result[2] + at[:, None] * dim_columns + columns[None, :], mixed, mask=kept[:, None])
    tl.store(result[3] + at, best, mask=kept)
    tl.store(result[4] + at, total, mask=kept)


@triton.jit
def _is_last(arrived_ptr, parts):
    """Whether all other parts have arrived; the last one leaves the counter at zero for the next layer.

    The barrier puts the stores of all threads before the atomic, which releases them to the program that acquires.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def _merge(
    result, parts, count, scales,
    group: tl.constexpr, group_rows: tl.constexpr, head_dim: tl.constexpr, dim_columns: tl.constexpr,
    kept_rows: tl.constexpr, splits: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """Weigh the parts by their best scores and totals, in their order; past the first cache, which may be stale.

    All that is known of some parts is loaded at once: a wait for memory takes longer than the computation.
    """
    out_ptr, out_token, parts_ptr, bests_ptr, totals_ptr, _, plane = result
    scale = scales[0]
    rows, columns = tl.arange(0, kept_rows), tl.arange(0, dim_columns)
    used = (rows < count * group_rows)[None, :]
    best = tl.full([kept_rows], UNSEEN, tl.float32)
    total = tl.zeros([kept_rows], tl.float32)
    mixed = tl.zeros([kept_rows, dim_columns], tl.float32)
    chunk: tl.constexpr = min(splits, max(1, 8192 // (kept_rows * dim_columns)))
    for start in range(0, parts, chunk):
        some = start + tl.arange(0, chunk)
        at, here = some[:, None] * plane + rows[None, :], (some < parts)[:, None] & used
        bests = tl.load(bests_ptr + at, mask=here, other=UNSEEN, cache_modifier=".cg")
        totals = tl.load(totals_ptr + at, mask=here, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts_ptr + at[:, :, None] * dim_columns + columns[None, None, :],
            mask=here[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(best, tl.max(bests, 0))
        kept, weight = tl.exp2((best - higher) * scale), tl.exp2((bests - higher[None, :]) * scale)
        total = total * kept + tl.sum(totals * weight, 0)
        mixed = mixed * kept[:, None] + tl.sum(part * weight[:, :, None], 0)
        best = higher
    if has_sinks:
        total, mixed = _sunk(best, total, mixed, scales, group, group_rows, kept_rows)
    mixed = mixed / _divisor(total)[:, None]
    _write(out_ptr, mixed, out_token, count, group, group_rows, head_dim, dim_columns, kept_rows)
