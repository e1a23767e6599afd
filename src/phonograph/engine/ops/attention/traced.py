"""TracedAttention: attention as one opaque call for each layer, where torch.compile traces the layers around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.queries import Attention, Queries, StepAttention
from phonograph.graphs.phases.context import Stage, current
from phonograph.graphs.phases.opaque import opaque


class TracedAttention:
    """`inner`; in a trace, a call that the trace does not look into."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name
        self.attend = opaque(self._attend, fake=_like_queries)
        self._places: tuple[torch.Tensor, ...] = ()
        self._steps: dict[tuple[int, int], tuple[StepAttention, int]] = {}
        """For a step whose tokens stand there, by keys and query heads; and the layer that it served last."""

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if current().stage is not Stage.COMPILING:
            return _AttendOnly(self._inner.prepare(cache, queries, num_heads))
        return _TracedStep(self, cache, queries)

    def _attend(
        self,
        layer: int,
        kept: tuple[torch.Tensor, torch.Tensor],
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tokens_per_row: int | None,
        by_row: bool,
        q: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        if len(self._places) != len(places) or any(a is not b for a, b in zip(self._places, places, strict=True)):
            self._places, self._steps = tuple(places), {}
        name = id(kept[0]), q.shape[1]
        step, last = self._steps.get(name, (None, layer))
        if step is None or layer <= last:  # a layer that is not the next one begins another run
            queries = Queries(*places, tokens_per_row=tokens_per_row, by_row=by_row)
            step = self._inner.prepare(PagedCache(*kept), queries, q.shape[1])
        self._steps[name] = step, layer
        return step.attend(layer, q, window)


@dataclass(frozen=True)
class _AttendOnly:
    """A step that rotates nothing, whatever its attention could do: eager passes then compute what a trace does."""

    inner: StepAttention

    def attend(self, layer: int, q: torch.Tensor, window: int | None, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner.attend(layer, q, window, out)


@dataclass(frozen=True)
class _TracedStep:
    """A step as a trace sees it."""

    outer: TracedAttention
    cache: PagedCache
    queries: Queries

    def attend(self, layer: int, q: torch.Tensor, window: int | None, out: torch.Tensor | None = None) -> torch.Tensor:
        queries, cache = self.queries, self.cache
        places = (queries.rows, queries.positions, queries.table)
        kept = (cache.keys, cache.values)
        mixed = self.outer.attend(layer, kept, places, queries.tokens_per_row, queries.by_row, q, window)
        return mixed if out is None else out.copy_(mixed)


def _like_queries(
    layer: int, kept: Any, places: Any, tokens_per_row: Any, by_row: Any, q: torch.Tensor, window: Any
) -> torch.Tensor:
    return torch.empty_like(q)
