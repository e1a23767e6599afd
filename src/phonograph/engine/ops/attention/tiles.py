"""Tile list: the tokens of a prefill step that share a tile, found on the device once per step.

A tile begins where the sequence changes or the tile before it is full. Tiles with the longest context come first, so
that no program starts a long walk when the others have ended; padding comes last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.engine.ops.triton.kernel import kernel
from phonograph.sizes import ceil_div, next_power_of_two

_ORDERED = 64
"""Tiles that one program puts in order."""


def max_tiles(num_tokens: int, tile_tokens: int, max_seqs: int) -> int:
    """How many tiles a bucket can have: full ones, and a last one of every sequence and of the padding."""
    return min(num_tokens, num_tokens // tile_tokens + max_seqs + 1)


def list_tiles(rows: torch.Tensor, positions: torch.Tensor, tile_tokens: int, max_seqs: int) -> torch.Tensor:
    """[max_tiles, 4]: first token, number of tokens, row and first position of each tile; 0 tokens where there is none.

    Padding makes tiles of row 0.
    """
    num_tokens = rows.shape[0]
    capacity = max_tiles(num_tokens, tile_tokens, max_seqs)
    found = torch.empty(3, capacity + 1, dtype=torch.int32, device=rows.device)
    tiles = torch.empty(capacity, 4, dtype=torch.int32, device=rows.device)
    if num_tokens == 0:
        return tiles
    num_found = torch.empty(1, dtype=torch.int32, device=rows.device)
    chunk = min(next_power_of_two(num_tokens), 4096)
    _find_tiles[(1,)](
        rows, positions, found, num_found, num_tokens, capacity, tile_tokens=tile_tokens, chunk=chunk,
        num_warps=max(1, min(16, chunk // 128)),
    )  # fmt: skip
    _order_tiles[(ceil_div(capacity, _ORDERED),)](
        found, num_found, tiles, capacity, ordered=_ORDERED, chunk=128, num_warps=4
    )
    return tiles


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@kernel()
def _find_tiles(
    rows_ptr, positions_ptr, found_ptr, num_found_ptr, num_tokens, capacity,
    tile_tokens: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """One program walks over the tokens: first token, row and position of each tile, in the order of the tokens."""
    number, opened = 0, 0  # tiles so far; first token of the run that goes on
    for begin in range(0, num_tokens, chunk):
        token = begin + tl.arange(0, chunk)
        inside, followed = token < num_tokens, (token < num_tokens) & (token > 0)
        row = tl.load(rows_ptr + token, mask=inside, other=0).to(tl.int32)
        position = tl.load(positions_ptr + token, mask=inside, other=0).to(tl.int32)
        row_before = tl.load(rows_ptr + token - 1, mask=followed, other=-1).to(tl.int32)
        position_before = tl.load(positions_ptr + token - 1, mask=followed, other=0).to(tl.int32)
        new_run = (row != row_before) | ((row != 0) & (position != position_before + 1))
        run = tl.maximum(tl.associative_scan(tl.where(new_run, token, 0), 0, _larger), opened)
        begins = inside & ((token - run) % tile_tokens == 0)
        tile = number + tl.cumsum(begins.to(tl.int32), 0) - 1
        kept = begins & (tile < capacity)
        tl.store(found_ptr + tile, token, mask=kept)
        tl.store(found_ptr + (capacity + 1) + tile, row, mask=kept)
        tl.store(found_ptr + 2 * (capacity + 1) + tile, position, mask=kept)
        number += tl.sum(begins.to(tl.int32), 0)
        opened = tl.max(run, 0)
    number = tl.minimum(number, capacity)
    tl.store(found_ptr + number, num_tokens)
    tl.store(num_found_ptr, number)


@kernel()
def _order_tiles(found_ptr, num_found_ptr, tiles_ptr, capacity, ordered: tl.constexpr, chunk: tl.constexpr):
    """Each tile goes to the place that its number of keys has among all; places that are left over get no tokens."""
    number = tl.load(num_found_ptr)
    tile = tl.program_id(0) * ordered + tl.arange(0, ordered)
    here = tile < number
    first = tl.load(found_ptr + tile, mask=here, other=0)
    count = tl.load(found_ptr + tile + 1, mask=here, other=0) - first
    row = tl.load(found_ptr + (capacity + 1) + tile, mask=here, other=0)
    position = tl.load(found_ptr + 2 * (capacity + 1) + tile, mask=here, other=0)
    keys = tl.where(row == 0, -1, position)
    rank = tl.zeros([ordered], tl.int32)
    for begin in range(0, number, chunk):
        other = begin + tl.arange(0, chunk)
        there = other < number
        other_row = tl.load(found_ptr + (capacity + 1) + other, mask=there, other=0)
        other_position = tl.load(found_ptr + 2 * (capacity + 1) + other, mask=there, other=0)
        other_keys = tl.where(other_row == 0, -1, other_position)[None, :]
        before = (other_keys > keys[:, None]) | ((other_keys == keys[:, None]) & (other[None, :] < tile[:, None]))
        rank += tl.sum((before & there[None, :]).to(tl.int32), 1)
    place = tl.where(here, rank, tile)
    inside = tile < capacity
    tl.store(tiles_ptr + place * 4, first, mask=inside)
    tl.store(tiles_ptr + place * 4 + 1, count, mask=inside)
    tl.store(tiles_ptr + place * 4 + 2, row, mask=inside)
    tl.store(tiles_ptr + place * 4 + 3, position, mask=inside)
