"""Attention in torch ops, for any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from phonograph.engine.attention.base import PagedCache, Queries, Span


class ReferenceAttention:
    """Graph-native where no spans are given: every token gathers its own pages. With spans, one call per sequence."""

    name = "reference"

    def attend(
        self, cache: PagedCache, layer: int, queries: Queries, q: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        if queries.spans is not None and not queries.one_per_sequence:
            return self._by_span(cache, layer, queries, q, window, queries.spans)
        num_tokens, width = queries.pages.shape
        keys = cache.keys[layer][queries.pages.long()]  # [num_tokens, width, page_size, kv_heads, head_dim]
        values = cache.values[layer][queries.pages.long()]
        length = width * cache.page_size
        keys = keys.view(num_tokens, length, *keys.shape[3:]).transpose(1, 2)
        values = values.view(num_tokens, length, *values.shape[3:]).transpose(1, 2)
        places = torch.arange(length, device=q.device)[None]
        seen = _seen(places, queries.positions[:, None], window)
        mixed = functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return mixed[:, :, 0]

    def _by_span(
        self,
        cache: PagedCache,
        layer: int,
        queries: Queries,
        q: torch.Tensor,
        window: int | None,
        spans: tuple[Span, ...],
    ) -> torch.Tensor:
        mixed = torch.zeros_like(q)
        size = cache.page_size
        for span in spans:
            end = span.start + span.count
            pages = queries.pages[span.first, : -(-end // size)].long()
            keys = cache.keys[layer][pages].flatten(0, 1)[:end].transpose(0, 1)  # [kv_heads, end, head_dim]
            values = cache.values[layer][pages].flatten(0, 1)[:end].transpose(0, 1)
            rows = slice(span.first, span.first + span.count)
            part = q[rows].transpose(0, 1)
            if span.start == 0 and window is None:
                out = functional.scaled_dot_product_attention(
                    part[None], keys[None], values[None], is_causal=True, enable_gqa=True
                )
            else:
                places = torch.arange(end, device=q.device)[None]
                asked = torch.arange(span.start, end, device=q.device)[:, None]
                mask = _seen(places, asked, window)
                out = functional.scaled_dot_product_attention(
                    part[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
                )
            mixed[rows] = out[0].transpose(0, 1)
        return mixed


def _seen(places: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which places a query at each position may look at."""
    seen = places <= positions
    return seen if window is None else seen & (places > positions - window)
