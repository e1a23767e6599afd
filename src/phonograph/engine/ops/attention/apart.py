"""ApartAttention: separate calls for tokens whose spans the host knows, and for those whose places it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.queries import PLAIN, Attention, Queries, Scores, StepAttention


class ApartAttention:
    """`inner`, once for the tokens before `Queries.spans_from`, from what is in device memory, and once for the rest.

    Where there are no spans, or they tell of every token, it is `inner` as it is.
    """

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        count, spans = queries.spans_from, queries.spans
        if not count or spans is None:
            return self._inner.prepare(cache, replace(queries, spans_from=0), num_heads)
        rows, positions = queries.rows, queries.positions
        untold = replace(queries, rows=rows[:count], positions=positions[:count], spans=None, spans_from=0)
        shifted = tuple(replace(span, first=span.first - count) for span in spans)
        told = replace(queries, rows=rows[count:], positions=positions[count:], spans=shifted, spans_from=0)
        parts = (self._inner.prepare(cache, part, num_heads) for part in (untold, told))
        return _ApartStep(count, *parts)


@dataclass(frozen=True)
class _ApartStep:
    """Both parts of a step."""

    count: int
    untold: StepAttention
    told: StepAttention

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self.untold.attend(layer, q[: self.count], window, out[: self.count], scores)
        self.told.attend(layer, q[self.count :], window, out[self.count :], scores)
        return out
