"""Reference attention: torch ops, for any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.queries import PLAIN, Queries, Scores, Span, StepAttention
from phonograph.sizes import ceil_div

ByToken = Callable[[PagedCache, torch.Tensor, torch.Tensor, torch.Tensor], StepAttention]
"""Attention of tokens that each look at their own row: from the cache, their rows and positions, and the table."""


class ReferenceAttention:
    """Graph-native where no spans are given: every token gathers its own pages. With spans, one call per prompt."""

    name = "reference"

    def __init__(self, by_token: ByToken | None = None) -> None:
        self._by_token = by_token or _ByToken.gathering

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if queries.spans is None or queries.tokens_per_row is not None:
            return self._by_token(cache, queries.rows, queries.token_positions, queries.table)
        single = next((i for i, span in enumerate(queries.spans) if span.count > 1), len(queries.spans))
        prompts = tuple(_Prompt.of(cache, queries, span) for span in queries.spans[single:])
        width = _num_pages(queries.spans[:single], cache.page_size)
        rows, positions = queries.rows[:single], queries.token_positions[:single]
        decodes = self._by_token(cache, rows, positions, queries.table[:, :width]) if single else None
        return _BySpan(single, decodes, prompts)


@dataclass(frozen=True)
class _ByToken:
    """Every token looks at all pages of its row; what comes after its position is masked."""

    cache: PagedCache
    positions: torch.Tensor  # [num_tokens]
    pages: torch.Tensor  # [num_tokens * width]
    keys: torch.Tensor  # [num_tokens * width, page_size, kv_heads, head_dim], gathered anew by every layer
    values: torch.Tensor
    after: torch.Tensor  # [num_tokens, length, 1, 1]: whether a place is after the token's position
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By window."""

    @staticmethod
    def gathering(cache: PagedCache, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> _ByToken:
        """Memory for the pages of all tokens, taken once for all layers: large pieces are mapped anew every time."""
        pages = table[rows]
        shape = (pages.numel(), *cache.keys.shape[2:])
        places = torch.arange(pages.shape[1] * cache.page_size, device=positions.device)
        after = (places > positions[:, None])[:, :, None, None]
        gathered = cache.keys.new_empty(shape), cache.values.new_empty(shape)
        return _ByToken(cache, positions, pages.flatten().long(), *gathered, after)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        kv_heads = self.keys.shape[2]
        # What lies after a position may be another sequence's, and not finite: a weight of 0 would not hide that.
        keys, values = (
            torch.index_select(pages[layer], 0, self.pages, out=gathered)
            .view(num_tokens, -1, kv_heads, head_dim)
            .masked_fill_(self.after, 0.0)
            .transpose(1, 2)
            for pages, gathered in ((self.cache.keys, self.keys), (self.cache.values, self.values))
        )
        # The query heads that share a key head are queries of one sequence: nothing is repeated for them.
        grouped = q.view(num_tokens, kv_heads, num_heads // kv_heads, head_dim)
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1)
        mask = self._mask(q.dtype, window)
        mixed = _mixed(grouped, keys, values, mask, scores._replace(sinks=sinks)).reshape(q.shape)
        return mixed if out is None else out.copy_(mixed)

    def _mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """[num_tokens, 1, 1, length]"""
        found = self.masks.get(window)
        if found is None:
            length = self.pages.shape[0] // max(1, self.positions.shape[0]) * self.cache.page_size
            places = torch.arange(length, device=self.positions.device)[None]
            found = self.masks[window] = _mask(places, self.positions[:, None], window, dtype)[:, None, None]
        return found


@dataclass(frozen=True)
class _BySpan:
    """The sequences that decode together, which stand first; a call for every prompt, over the pages that it fills."""

    num_decodes: int
    decodes: StepAttention | None
    prompts: tuple[_Prompt, ...]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        mixed = torch.zeros_like(q) if out is None else out.zero_()
        if self.decodes is not None:
            mixed[: self.num_decodes] = self.decodes.attend(layer, q[: self.num_decodes], window, None, scores)
        for prompt in self.prompts:
            prompt.attend(layer, q, window, mixed, scores)
        return mixed


@dataclass(frozen=True)
class _Prompt:
    """A span of one sequence."""

    cache: PagedCache
    span: Span
    pages: torch.Tensor  # [those that it fills up to its end]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(cache: PagedCache, queries: Queries, span: Span) -> _Prompt:
        width = _num_pages([span], cache.page_size)
        return _Prompt(cache, span, queries.table[span.row, :width].long())

    def attend(self, layer: int, q: torch.Tensor, window: int | None, mixed: torch.Tensor, scores: Scores) -> None:
        """Write what the queries of the span see to their rows of `mixed`."""
        first, end = self.span.first, self.span.start + self.span.count
        rows = slice(first, first + self.span.count)
        keys, values = (
            pages[layer].index_select(0, self.pages).flatten(0, 1)[:end].transpose(0, 1)[None]  # [1, kv_heads, end, …]
            for pages in (self.cache.keys, self.cache.values)
        )
        if scores.softcap is not None or scores.sinks is not None:
            kv_heads = keys.shape[1]
            grouped = (
                q[rows].reshape(self.span.count, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
            )  # [kv_heads, group, count, head_dim]
            sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1, 1)
            kept = keys[0, :, None], values[0, :, None]
            out = _mixed(grouped, *kept, self._mask(q, window), scores._replace(sinks=sinks))
            mixed[rows] = out.permute(2, 0, 1, 3).flatten(1, 2)
            return
        causal = self.span.start == 0 and window is None
        out = functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=None if causal else self._mask(q, window),
            is_causal=causal,
            scale=scores.scale,
            enable_gqa=True,
        )
        mixed[rows] = out[0].transpose(0, 1)

    def _mask(self, q: torch.Tensor, window: int | None) -> torch.Tensor:
        found = self.masks.get(window)
        if found is None:
            end = self.span.start + self.span.count
            places = torch.arange(end, device=q.device)
            found = self.masks[window] = _mask(places[None], places[self.span.start :, None], window, q.dtype)
        return found


def by_token(cache: PagedCache, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> StepAttention:
    """Attention of tokens that each look at their own row."""
    return _ByToken.gathering(cache, rows, positions, table)


def _mixed(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Values mixed by the softmax of scores; torch's own attention where that computes them. Sinks fit the scores."""
    if scores.softcap is None and scores.sinks is None:
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scores.scale)
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    found = (q @ keys.transpose(-1, -2)) * scale
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    found = (found + mask).float()
    if scores.sinks is None:
        return found.softmax(-1).to(q.dtype) @ values
    sinks = scores.sinks.float().expand(*found.shape[:-1], 1)
    weights = torch.cat([found, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(q.dtype) @ values


def _num_pages(spans: Sequence[Span], page_size: int) -> int:
    """Pages that the longest of these sequences fills."""
    return ceil_div(max((span.start + span.count for span in spans), default=0), page_size)


def _mask(places: torch.Tensor, positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What to add to scores: nothing where a query at a position may look, and what hides the rest."""
    seen = places <= positions
    seen = seen if window is None else seen & (places > positions - window)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
