"""CPU attention: C++ in float32, in which every token walks the pages of its own row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.attention.reference import ReferenceAttention, by_token
from phonograph.engine.ops.native.library import Library
from phonograph.engine.ops.queries import PLAIN, Queries, Scores, StepAttention
from phonograph.errors import DeclarationError


@dataclass(frozen=True)
class CpuAttention:
    """For steps that are not recorded. Prompts, and what is not in float32, are left to the reference."""

    library: Library
    name = "cpu"

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        fits = cache.keys.dtype == torch.float32 and self.library.can_attend(cache.keys.shape[-1])
        return ReferenceAttention(self._by_token if fits else None).prepare(cache, queries, num_heads)

    def _by_token(
        self, cache: PagedCache, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> StepAttention:
        return _ByToken(self.library, cache, rows.long().contiguous(), positions.long().contiguous(), table)


@dataclass(frozen=True)
class _ByToken:
    library: Library
    cache: PagedCache
    rows: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    table: torch.Tensor  # [num_rows, width], the rows as far apart as in the whole table

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        if not scores.is_plain:
            plain = by_token(self.cache, self.rows, self.positions, self.table)
            return plain.attend(layer, q, window, out, scores)
        q, (keys, values) = q.contiguous(), (self.cache.keys, self.cache.values)
        num_tokens, num_heads, head_dim = q.shape
        if head_dim != keys.shape[4] or num_heads % keys.shape[3]:
            raise DeclarationError(
                f"attention of {num_heads} heads of {head_dim} numbers over pages of {keys.shape[3]} heads of "
                f"{keys.shape[4]}: they don't fit. Correct Model.keeps, or the heads."
            )
        offset = layer * keys.stride(0) * keys.itemsize
        out = torch.empty_like(q) if out is None else out
        self.library.attended(
            *(q.data_ptr(), num_tokens, num_heads, keys.data_ptr() + offset, values.data_ptr() + offset),
            *(self.cache.page_size, keys.shape[3], head_dim, self.rows.data_ptr(), self.positions.data_ptr()),
            *(self.table.data_ptr(), self.table.stride(0), window or 0, out.data_ptr(), torch.get_num_threads()),
        )
        return out
