"""GapAttention: attention as a graph break, which sees the sequences of the live batch between two graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.queries import PLAIN, Attention, Queries, Scores, StepAttention
from phonograph.graphs.phases.breaks import graph_break
from phonograph.graphs.phases.context import Stage, current


def _into_out(*args: Any) -> Any:
    return args[-1]


class GapAttention:
    """`inner`, in the gaps of a recording that has them; everywhere else as it is."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name
        self._batch: object = None
        self._caches: dict[int, PagedCache] = {}
        """Caches of the gaps so far, by the id of their keys."""
        self._steps: dict[tuple[int, int], StepAttention] = {}
        """For that batch, by keys and query heads."""

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if current().breaker is None and current().stage is not Stage.COMPILING:
            return self._inner.prepare(cache, queries, num_heads)
        if current().breaker is not None:
            self._caches[id(cache.keys)] = cache
        return _GapStep(self, cache, queries)

    @graph_break(fake=_into_out, mutates=("out",))
    def attend(
        self,
        layer: int,
        keys: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        q: torch.Tensor,
        window: int | None,
        scores: tuple[float | None, float | None, torch.Tensor | None],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """In a gap; `keys` tell which cache. What is mixed is written to `out`."""
        step = self.prepared(keys, rows, positions, table, q.shape[1])
        return step.attend(layer, q, window, out, Scores(*scores))

    def prepared(
        self, keys: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, num_heads: int
    ) -> StepAttention:
        """For the step that is replayed; the first gap of a shape prepares for all of them."""
        batch = current().batch
        if self._batch is not batch:
            self._batch, self._steps = batch, {}
        found = self._steps.get((id(keys), num_heads))
        if found is None:
            queries = Queries(rows, positions, table, None, batch.spans, batch.spans_from)
            found = self._inner.prepare(self._caches[id(keys)], queries, num_heads)
            self._steps[id(keys), num_heads] = found
        return found


@dataclass(frozen=True)
class _GapStep:
    """Attends in gaps, by what was prepared for the live batch."""

    outer: GapAttention
    cache: PagedCache
    queries: Queries

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        # Made by the graph before the gap, for the one after it: nothing is copied between them.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        queries, keys = self.queries, self.cache.keys
        places = queries.rows, queries.positions, queries.table
        return self.outer.attend(layer, keys, *places, q, window, tuple(scores), out)
