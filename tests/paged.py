"""Random paged caches and the queries of a step on them, for tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.devices import open_device
from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.attention.launch_config import launches_for
from phonograph.engine.ops.queries import PLAIN, Attention, Queries, Scores, Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAUNCHES = launches_for(open_device(DEVICE).hardware)


@dataclass(frozen=True)
class Heads:
    """The shape of one attention."""

    queries: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Case:
    """A step: what is cached, who asks, and what is asked."""

    cache: PagedCache
    queries: Queries
    q: torch.Tensor
    used: int
    """Tokens that are no padding."""

    def run(
        self, attention: Attention, layer: int = 0, window: int | None = None, scores: Scores = PLAIN
    ) -> torch.Tensor:
        """The result for the tokens that are no padding."""
        out = attention.prepare(self.cache, self.queries, self.q.shape[1]).attend(layer, self.q, window, None, scores)
        assert out.shape == self.q.shape
        return out[: self.used]


def spans_of(*sequences: tuple[int, int]) -> list[Span]:
    """Spans of (start, count), in rows 1, 2, …"""
    spans: list[Span] = []
    for start, count in sequences:
        first = spans[-1].first + spans[-1].count if spans else 0
        spans.append(Span(len(spans) + 1, first, start, count))
    return spans


def case_of(
    spans: list[Span],
    heads: Heads,
    *,
    padding: int = 0,
    page_size: int = 4,
    decode: bool = False,
    dtype: torch.dtype = torch.float32,
    spare_rows: int = 2,
) -> Case:
    """A random cache in shuffled pages; the table has some rows and pages that nobody uses."""
    torch.manual_seed(0)
    most = max(-(-(span.start + span.count) // page_size) for span in spans) + 1
    num_rows = len(spans) + spare_rows
    num_pages = 1 + most * num_rows
    cache = PagedCache.empty(2, num_pages, page_size, heads.kv, heads.dim, dtype=dtype, device=DEVICE)
    cache.keys.normal_()
    cache.values.normal_()
    pages = (torch.randperm(most * num_rows) + 1).view(num_rows, most).int()
    table = torch.cat([torch.zeros(1, most, dtype=torch.int32), pages]).to(DEVICE)
    rows = [span.row for span in spans for _ in range(span.count)]
    positions = [span.start + offset for span in spans for offset in range(span.count)]
    used = len(rows)
    queries = Queries(
        torch.tensor(rows + [0] * padding, device=DEVICE),
        torch.tensor(positions + [0] * padding, device=DEVICE),
        table,
        tokens_per_row=1 if decode else None,
    )
    q = torch.randn(used + padding, heads.queries, heads.dim, device=DEVICE).to(dtype)
    return Case(cache, queries, q, used)


def by_hand(case: Case, layer: int = 0, window: int | None = None, scores: Scores = PLAIN) -> torch.Tensor:
    """One query at a time, in float64."""
    cache, queries, q = case.cache, case.queries, case.q[: case.used]
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // cache.keys.shape[3]
    for token in range(case.used):
        position = int(queries.positions[token])
        first = 0 if window is None else max(0, position - window + 1)
        pages = queries.table[queries.rows[token]].long()
        keys = cache.keys[layer][pages].flatten(0, 1)[first : position + 1].double()
        values = cache.values[layer][pages].flatten(0, 1)[first : position + 1].double()
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        found = torch.einsum("hd,khd->hk", q[token].double(), keys)
        found = found * (q.shape[2] ** -0.5 if scores.scale is None else scores.scale)
        if scores.softcap is not None:
            found = torch.tanh(found / scores.softcap) * scores.softcap
        if scores.sinks is not None:
            found = torch.cat([found, scores.sinks.double()[:, None]], 1)
        out[token] = torch.einsum("hk,khd->hd", found.softmax(1)[:, : len(keys)], values)
    return out


def poison_dead(case: Case, value: float) -> None:
    """Write `value` to all that no query may see: free pages, the null page, and slots behind the last token."""
    size = case.cache.page_size
    live = torch.zeros(case.cache.keys.shape[1:3], dtype=torch.bool, device=DEVICE)
    for token in range(case.used):
        at = torch.arange(int(case.queries.positions[token]) + 1, device=DEVICE)
        pages = case.queries.table[case.queries.rows[token]].long()
        live[pages[at // size], at % size] = True
    case.cache.keys[:, ~live] = value
    case.cache.values[:, ~live] = value
