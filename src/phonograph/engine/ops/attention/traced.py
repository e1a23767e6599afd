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
        self._steps: dict[tuple[int, int], StepAttention] = {}
        """For a step whose tokens stand there, by keys and query heads."""

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if current().stage is not Stage.COMPILING:
            return self._inner.prepare(cache, queries, num_heads)
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
        # Every run of a recorded body has views of its own, so the same tensors are those of the same step.
        if len(self._places) != len(places) or any(a is not b for a, b in zip(self._places, places, strict=True)):
            self._places, self._steps = tuple(places), {}
        found = self._steps.get((id(kept[0]), q.shape[1]))
        if found is None:
            queries = Queries(*places, tokens_per_row=tokens_per_row, by_row=by_row)
            found = self._inner.prepare(PagedCache(*kept), queries, q.shape[1])
            self._steps[id(kept[0]), q.shape[1]] = found
        return found.attend(layer, q, window)


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
