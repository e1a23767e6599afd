"""Ends of a step: embed_tokens, which its layers begin with, and write_next_token into the tables. One launch each."""

from __future__ import annotations

import torch
import triton.language as tl

from phonograph.engine.ops.kernels import Angles, Places
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton.dependent_launch import begin, code, dependent, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Overlap
from phonograph.sizes import ceil_div, next_power_of_two

_BLOCK = 256


@kernel()
def _embed_tokens(
    tokens_ptr, positions_ptr, rows_ptr, table_ptr, embedding_ptr, cos_ptr, sin_ptr,
    x_ptr, out_cos_ptr, out_sin_ptr, slots_ptr, table_row, embedding_row, angle_row,
    by_row: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, page_size: tl.constexpr,
    head_dim: tl.constexpr, dim_columns: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One token: its embedding; its angles and slot, which every layer would otherwise look up anew."""
    token = tl.program_id(0).to(tl.int64)
    column, dim = tl.arange(0, columns), tl.arange(0, dim_columns)
    inside, in_head = column < width, dim < head_dim
    begin(overlap)
    wait_for_inputs(overlap)
    row = tl.load(rows_ptr + token).to(tl.int64)
    at = row if by_row else token
    word = tl.load(tokens_ptr + at).to(tl.int64)
    position = tl.load(positions_ptr + at).to(tl.int64)
    x = tl.load(embedding_ptr + word * embedding_row + column, mask=inside)
    tl.store(x_ptr + token * width + column, x.to(x_ptr.dtype.element_ty), inside)
    page = tl.load(table_ptr + row * table_row + position // page_size).to(tl.int64)
    tl.store(slots_ptr + token, page * page_size + position % page_size)
    cos = tl.load(cos_ptr + position * angle_row + dim, mask=in_head, other=0.0)
    sin = tl.load(sin_ptr + position * angle_row + dim, mask=in_head, other=0.0)
    tl.store(out_cos_ptr + token * head_dim + dim, cos, mask=in_head)
    tl.store(out_sin_ptr + token * head_dim + dim, sin, mask=in_head)


@kernel(unspecialised=["num_tokens"])
def _write_next_token(
    rows_ptr, positions_ptr, tokens_ptr, last_token_ptr, length_ptr, num_tokens,
    by_row: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Some rows: the new token and length of each; padding has no row."""
    token = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(rows_ptr + token, mask=token < num_tokens, other=0)
    real = row > 0
    position = tl.load(positions_ptr + (row if by_row else token), mask=real, other=0)
    picked = tl.load(tokens_ptr + token, mask=real, other=0)
    tl.store(last_token_ptr + row, tl.maximum(picked, 0), mask=real)
    tl.store(length_ptr + row, position + 1, mask=real)


def embed_tokens(
    embedding: torch.Tensor,
    tokens: torch.Tensor,
    angles: Angles,
    queries: Queries,
    page_size: int,
    residual: torch.dtype,
    *,
    overlap: Overlap = "none",
) -> tuple[torch.Tensor, Places]:
    """The tokens' rows of the embedding, in the dtype of the residual stream, and their places."""
    num_tokens, head_dim, width, on = queries.rows.shape[0], angles.cos.shape[1], embedding.shape[1], embedding.device
    x = torch.empty((num_tokens, width), dtype=residual, device=on)
    cos = torch.empty((num_tokens, head_dim), dtype=angles.cos.dtype, device=on)
    sin = torch.empty_like(cos)
    slots = torch.empty(num_tokens, dtype=torch.int64, device=on)
    if num_tokens:
        columns = next_power_of_two(width)
        _embed_tokens[(num_tokens,)](
            tokens, queries.positions, queries.rows, queries.table, embedding, angles.cos, angles.sin,
            x, cos, sin, slots, queries.table.stride(0), embedding.stride(0), angles.cos.stride(0),
            by_row=queries.by_row, width=width, columns=columns, page_size=page_size,
            head_dim=head_dim, dim_columns=next_power_of_two(head_dim), overlap=code(overlap),
            num_warps=min(8, max(1, columns // 512)), **dependent(overlap),
        )  # fmt: skip
    return x, Places(cos, sin, slots)


def write_next_token(queries: Queries, tokens: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor) -> None:
    """Note new tokens and lengths in the tables."""
    num_tokens = tokens.shape[0]
    if num_tokens:
        _write_next_token[(ceil_div(num_tokens, _BLOCK),)](
            queries.rows, queries.positions, tokens, last_token, length, num_tokens,
            by_row=queries.by_row, block=_BLOCK, num_warps=4,
        )  # fmt: skip
