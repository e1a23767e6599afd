"""Reference kernels: torch ops, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.kernels import Angles, Heads, Norm, Op, Places
from phonograph.engine.ops.layers.rounds import ReferenceRounds
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Queries
from phonograph.graphs.phases.opaque import opaque


class ReferenceKernels:
    """Every step of the arithmetic as torch does it."""

    name = "reference"
    rounds = ReferenceRounds()

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self.notes = notes

    def prepare(self, matrix: Matrix) -> Matrix:
        return matrix

    def takes(self, op: Op, num_tokens: int, matrix: Matrix) -> bool:
        return True

    def resume_overlap(self) -> None:
        """Nothing overlaps."""

    def embed_tokens(
        self,
        embedding: torch.Tensor,
        tokens: torch.Tensor,
        angles: Angles,
        queries: Queries,
        page_size: int,
        residual: torch.dtype,
    ) -> tuple[torch.Tensor, Places]:
        places = self.places(angles, queries, page_size)
        x = functional.embedding(tokens[queries.rows] if queries.by_row else tokens, embedding)
        return x.to(residual), places

    def places(self, angles: Angles, queries: Queries, page_size: int) -> Places:
        positions = queries.token_positions
        return Places(angles.cos[positions], angles.sin[positions], slots_of(queries, page_size))

    def write_next_token(
        self,
        queries: Queries,
        tokens: torch.Tensor,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        rows = queries.rows
        real = rows > 0
        last_token.index_put_((rows,), tokens.clamp_min(0) * real)
        length.index_put_((rows,), (queries.token_positions + 1) * real)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if delta is None else x + delta
        return _normed(x, norm), x

    def joined_norms(self, parts: Sequence[torch.Tensor], norms: Sequence[Norm]) -> torch.Tensor:
        return torch.cat([_normed(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=-1)

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.add_norm(x, delta, norm)
        return linear(h, matrix), x

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.add_norm(x, delta, norm)
        return self.silu_mul(linear(h, gate_up)), x

    def linear(self, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear(x, matrix, dtype)

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        places: Places,
        cache: PagedCache,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv = heads.num_kv_heads
        mixed = qkv.view(qkv.shape[0], -1, heads.head_dim)
        q, k, v = mixed[:, : heads.num_heads], mixed[:, -2 * kv : -kv], mixed[:, -kv:]
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = _normed(q, heads.q_norm), _normed(k, heads.k_norm)
        cos, sin = places.cos[:, None].to(q.dtype), places.sin[:, None].to(q.dtype)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        store(cache, layer, places, k, v)
        return q if out is None else out.copy_(q)


class TracedKernels(ReferenceKernels):
    """The same in a trace, which is one program for every number of tokens: no step is cut into pieces."""


def linear(x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x projected by torch, with sums in `dtype` where that is given. Takes any matrix."""
    weight, bias = matrix.values(), matrix.bias
    if dtype in (None, weight.dtype):
        return functional.linear(x, weight, bias)
    if x.is_cuda:
        sums = torch.mm(x, weight.t(), out_dtype=dtype)
        return sums if bias is None else sums.add_(bias)
    # torch's CPU products have one dtype
    return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def store(cache: PagedCache, layer: int, places: Places, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write keys and values ([num_tokens, num_kv_heads, head_dim]) into the pages of their tokens."""
    store_at(cache, layer, places.slots, k, v)


def store_at(cache: PagedCache, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """As `store`, into these slots."""
    _store(cache.keys, cache.values, layer, slots, k, v)


def slots_of(queries: Queries, page_size: int) -> torch.Tensor:
    """[num_tokens]: page · page_size + place in the page, for the keys and values of the tokens of a step."""
    positions = queries.token_positions
    pages = queries.table[queries.rows, positions // page_size].long()
    return pages * page_size + positions % page_size


def _write_pages(
    keys: torch.Tensor, values: torch.Tensor, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    keys[layer].flatten(0, 1).index_put_((slots,), k)
    values[layer].flatten(0, 1).index_put_((slots,), v)


# A compiler that saw the write might copy the cache.
_store = opaque(_write_pages, fake=lambda keys, values, layer, slots, k, v: None, mutates=("keys", "values"))


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """In the dtype of the norm's weight; computed in that of x, which may be wider."""
    weight = norm.weight.to(x.dtype)
    return functional.rms_norm(x, (x.shape[-1],), weight, norm.eps).to(norm.weight.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ([num_tokens, heads, head_dim]) turned by its positions' angles."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
