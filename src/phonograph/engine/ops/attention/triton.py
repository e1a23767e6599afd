"""Triton attention: what a step shares, and the launch of the kernel in each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.attention.kernel import attend
from phonograph.engine.ops.attention.launch_config import PLAIN, Launches, pick
from phonograph.engine.ops.attention.tiles import list_tiles
from phonograph.engine.ops.kernels import Heads, Places
from phonograph.engine.ops.queries import PLAIN as PLAIN_SCORES
from phonograph.engine.ops.queries import Queries, Scores, StepAttention
from phonograph.engine.ops.triton.dependent_launch import code, dependent
from phonograph.engine.ops.tuning import Overlap
from phonograph.sizes import ceil_div, next_power_of_two

_MOST_ROTATED = 64
"""Tokens up to which a decode step rotates and attends in one launch; with 128 two are faster by 1 %."""
_NARROW = 2048
"""Columns of all query heads up to which a decode step is bound by launches; measured at 576 and 4,096."""


class TritonAttention:
    """Paged attention for GPUs. It keeps no tensors: what a step needs is made in the step, in the graph's own pool.

    So graphs of all buckets share it, the parts that programs leave for each other take the same memory layer after
    layer, and the counters of arrivals are zeroed by the graph that uses them, whatever ran before.
    `overlap` says how the kernel lets its neighbours begin; it needs sm_90 or later.
    """

    name = "triton"

    def __init__(self, launches: Launches = PLAIN, *, overlap: Overlap = "none") -> None:
        self._launches = launches
        self._overlap = overlap

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        rows, kv_heads, head_dim = queries.rows, cache.keys.shape[3], cache.keys.shape[4]
        launches = self._launches
        row_bytes = head_dim * cache.keys.element_size()
        # Programs that each write a key can't wait for each other: rows of several tokens take the way of prompts.
        is_decode = queries.tokens_per_row == 1
        known = launches.decode if is_decode else launches.prefill
        if is_decode and row_bytes <= 128:
            known = launches.narrow + known
        launch = pick(known, rows.shape[0], row_bytes)
        group_rows = next_power_of_two(num_heads // kv_heads)
        block_m = max(launch.block_m, group_rows)
        num_tiles, tile_tokens, tiles = rows.shape[0], 1, None
        if not is_decode:
            tile_tokens = block_m // group_rows
            tiles = list_tiles(rows, queries.positions, tile_tokens, queries.table.shape[0] - 1)
            num_tiles = tiles.shape[0]
        splits = launch.splits(ceil_div(rows.shape[0], tile_tokens), kv_heads)
        dim_columns = max(16, next_power_of_two(head_dim))
        # Where nothing is split, no program counts, and none leaves a part for others.
        arrived, parts = rows, cache.keys
        if splits > 1:
            arrived = torch.zeros(num_tiles * kv_heads, dtype=torch.int32, device=rows.device)
            num_left = rows.shape[0] * group_rows * kv_heads * splits
            parts = torch.empty(num_left * (dim_columns + 2), dtype=torch.float32, device=rows.device)
        rotates = is_decode and rows.shape[0] <= _MOST_ROTATED
        # Decode steps of wide models are bound by memory: programs that come early are in the way of those at work.
        is_bound = is_decode and num_heads * head_dim > _NARROW
        overlap = "none" if is_bound else self._overlap
        step = _TritonDecode if rotates else _TritonStep
        constants = dict(
            page_size=cache.page_size, group=num_heads // kv_heads, group_rows=group_rows, head_dim=head_dim,
            dim_columns=dim_columns, block_m=block_m, block_n=launch.block_n, splits=splits,
            tiled=tiles is not None, wide=cache.keys[0].numel() >= 1 << 31, apart=launch.apart, by_row=queries.by_row,
            overlap=code(overlap), num_warps=launch.num_warps, num_stages=launch.num_stages,
            **launch.bounds, **dependent(overlap),
        )  # fmt: skip
        grid = kv_heads, splits, num_tiles
        return step(cache, queries, grid, tiles, parts, arrived, head_dim**-0.5, launch.part_keys, constants)


@dataclass(frozen=True)
class _TritonStep:
    """The queries of one step, cut into tiles; what its layers' launches have in common."""

    cache: PagedCache
    queries: Queries
    grid: tuple[int, int, int]
    tiles: torch.Tensor | None
    """None where every token is a tile of its own."""
    parts: torch.Tensor
    """What programs leave for the last of them: values, best scores and totals. Layers use it one after the other."""
    arrived: torch.Tensor
    """How many parts of each tile and KV head are done; zero between two layers."""
    scale: float
    """What products are multiplied by, unless a layer says otherwise."""
    part_keys: int
    constants: dict[str, int]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        return self._launch(layer, q, None, window, out, scores)

    def _launch(
        self,
        layer: int,
        q: torch.Tensor,
        turning: tuple[Heads, Places] | None,
        window: int | None,
        out: torch.Tensor,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        """Of queries; or of projections, and how they are to be normed, turned and put away."""
        num_tokens, queries = out.shape[0], self.queries
        if num_tokens == 0:
            return out
        keys, values = self.cache.layers[layer]
        heads, places = turning or (None, None)
        q_norm, k_norm = (heads.q_norm, heads.k_norm) if heads else (None, None)
        scale, bend, softcap = _scales(self.scale if scores.scale is None else scores.scale, scores.softcap)
        attend[self.grid](
            q, keys, values, queries.table, queries.rows, queries.positions,
            queries.rows if self.tiles is None else self.tiles, out, self.parts, self.arrived,
            *((q, q, q) if places is None else (places.cos, places.sin, places.slots)),
            q if q_norm is None else q_norm.weight, q if k_norm is None else k_norm.weight,
            q if scores.sinks is None else scores.sinks,
            0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps,
            scale, bend, softcap,
            window or 0, self.part_keys, num_tokens, q.stride(0), q.stride(1), queries.table.stride(0),
            *keys.stride()[:3], windowed=window is not None, rotating=turning is not None,
            has_norm=q_norm is not None and k_norm is not None, softcapped=scores.softcap is not None,
            has_sinks=scores.sinks is not None, **self.constants,
        )  # fmt: skip
        return out


def _scales(scale: float, softcap: float | None) -> tuple[float, float, float]:
    """What the kernel multiplies scores by before exp2; products before they are bent; and what bent ones are up to."""
    if softcap is None:
        return scale * math.log2(math.e), 0.0, 0.0
    return math.log2(math.e), scale / softcap, softcap


class _TritonDecode(_TritonStep):
    """One token of each sequence: no program waits for a key of another, so all of it is one launch."""

    def rotate_and_attend(
        self, layer: int, qkv: torch.Tensor, heads: Heads, places: Places, window: int | None
    ) -> torch.Tensor:
        projected = qkv.view(qkv.shape[0], heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        shape = (qkv.shape[0], heads.num_heads, heads.head_dim)
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        return self._launch(layer, projected, (heads, places), window, out)
