"""CacheGroup: what the layers of one model keep, in pages whose numbers other groups may share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Paged:
    """What a layer keeps that attends to every token before: keys and values, in pages."""

    num_kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


Kept = Paged
"""What a layer may keep in pages. Per-sequence state, of layers other than attention, is in columns of the model."""


def page_bytes(keeps: Sequence[Kept], page_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page number costs, over all layers."""
    return page_size * sum(kept.token_bytes(dtype) for kept in keeps)


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of layers of one shape, in one allocation each; page 0 belongs to padding."""

    keys: torch.Tensor  # [num_layers, num_pages, page_size, num_kv_heads, head_dim]
    values: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @cached_property
    def layers(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Keys and values of each layer."""
        return tuple(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @staticmethod
    def empty(
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedCache:
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        return PagedCache(
            torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        )


@dataclass(frozen=True)
class CacheGroup:
    """Owns what some layers keep: those of one shape lie in one `PagedCache`, whatever their order.

    Groups with the same number of pages share page numbers: a page that is shared, evicted or freed is so in all of
    them. So the layers of a second model, such as a drafter's, need no block pool of their own.
    """

    places: tuple[tuple[PagedCache, int], ...]
    """For every layer the cache that it is in, and its index there: what attention and kernels take."""
    by_row: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What layers keep of a sequence as a whole: the tensors of the model's columns, a row for each sequence."""

    @staticmethod
    def empty(
        keeps: Sequence[Kept], num_pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> CacheGroup:
        """Room for what each of the layers keeps."""
        if not keeps:
            raise ValueError("a cache group has no layers; expected at least one.")
        members = {kept: [layer for layer, other in enumerate(keeps) if other == kept] for kept in dict.fromkeys(keeps)}
        caches = {
            kept: PagedCache.empty(
                len(layers), num_pages, page_size, kept.num_kv_heads, kept.head_dim, dtype=dtype, device=device
            )
            for kept, layers in members.items()
        }
        return CacheGroup(tuple((caches[kept], members[kept].index(layer)) for layer, kept in enumerate(keeps)))

    def beside(self, keeps: Sequence[Kept], *, dtype: torch.dtype | None = None) -> CacheGroup:
        """A further group of layers on the same page numbers."""
        like = self.tensors[0]
        return CacheGroup.empty(
            keeps, self.num_pages, self.page_size, dtype=like.dtype if dtype is None else dtype, device=like.device
        )

    @cached_property
    def caches(self) -> tuple[PagedCache, ...]:
        """One for each shape, in the order of the layers that come first."""
        return tuple({id(cache): cache for cache, _ in self.places}.values())

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory of the group; pages are the second dim of each."""
        return tuple(tensor for cache in self.caches for tensor in (cache.keys, cache.values))

    @cached_property
    def page_size(self) -> int:
        return self.caches[0].page_size

    @property
    def num_pages(self) -> int:
        return self.tensors[0].shape[1]
