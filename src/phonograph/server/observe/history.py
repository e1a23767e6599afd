"""History: the last ten minutes, a point each second, so that a page loaded now shows what happened before."""

from __future__ import annotations

from collections import deque

import msgspec

from phonograph.engine.process.statistics import EngineStats
from phonograph.server.observe.histogram import Distribution
from phonograph.server.observe.metrics import Metrics

MAX_POINTS = 600
LATENCY_WINDOW = 60
"""Points over which current latencies are computed."""


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One second; latencies are None where nothing was timed in it."""

    at: float
    """Unix time."""
    running: int
    waiting: int
    output_rate: float
    """Tokens generated, per second."""
    prompt_rate: float
    """Prompt tokens of admitted requests, per second."""
    first_token_p50: float | None
    first_token_p95: float | None
    token_gap_p50: float | None
    token_gap_p95: float | None
    kv_use: float
    prefix_hits: float | None
    """Prefix cache hit rate: tokens found of tokens looked up."""


class HistoryPoints(msgspec.Struct, frozen=True):
    """Consecutive points as rows under column names."""

    first: int
    """The number of the first row; numbers go on from point to point."""
    columns: tuple[str, ...]
    rows: tuple[HistoryPoint, ...]


class LatencyQuantiles(msgspec.Struct, frozen=True):
    """Quantiles in seconds; None where nothing was timed."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


class History:
    """Samples the metrics at each `tick`, and keeps a bounded number of points."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._timed = (metrics.first_token_seconds, metrics.token_gap_seconds, metrics.request_seconds)
        self._rows: deque[HistoryPoint] = deque(maxlen=MAX_POINTS)
        self._num_taken = 0
        self._last: EngineStats | None = None
        self._marks: deque[list[list[int]]] = deque(maxlen=LATENCY_WINDOW)
        """Histogram snapshots at each of the last ticks."""

    def tick(self, now: float) -> None:
        """Add a point for what happened since the last one; `now` is in Unix time."""
        stats = self._metrics.stats
        before = self._marks[-1] if self._marks else [[], [], []]
        first_token, token_gap, _ = zip(self._timed, before, strict=True)
        output_rate, prompt_rate = _rates(self._last, stats, now - self._rows[-1].at if self._rows else 0.0)
        sample = HistoryPoint(
            at=round(now, 2),
            running=stats.running if stats else 0,
            waiting=stats.waiting if stats else 0,
            output_rate=output_rate,
            prompt_rate=prompt_rate,
            first_token_p50=_rounded(first_token[0].quantile(0.5, first_token[1])),
            first_token_p95=_rounded(first_token[0].quantile(0.95, first_token[1])),
            token_gap_p50=_rounded(token_gap[0].quantile(0.5, token_gap[1])),
            token_gap_p95=_rounded(token_gap[0].quantile(0.95, token_gap[1])),
            kv_use=round(stats.kv_use, 4) if stats else 0.0,
            prefix_hits=_prefix_hits(self._last, stats),
        )
        self._rows.append(sample)
        self._num_taken += 1
        self._last = stats
        self._marks.append([list(timed.counts) for timed in self._timed])

    def since(self, number: int) -> HistoryPoints:
        """The points from this number on, as far as they are kept."""
        first = max(number, self._num_taken - len(self._rows))
        rows = tuple(self._rows)[first - self._num_taken :] if first < self._num_taken else ()
        return HistoryPoints(min(first, self._num_taken), HistoryPoint.__struct_fields__, rows)

    def latencies(self) -> tuple[LatencyQuantiles, LatencyQuantiles, LatencyQuantiles]:
        """First token, token gap and whole request, over the last minute."""
        marks = self._marks[0] if len(self._marks) == LATENCY_WINDOW else [[], [], []]
        first_token, token_gap, whole = (
            _latency_quantiles(d, mark) for d, mark in zip(self._timed, marks, strict=True)
        )
        return first_token, token_gap, whole


def _rates(before: EngineStats | None, now: EngineStats | None, interval: float) -> tuple[float, float]:
    """Output and prompt tokens per second of the core's own clock; without new stats, zero."""
    if before is None or now is None or now.clock <= before.clock:
        return 0.0, 0.0
    seconds = now.clock - before.clock
    if not before.running and not before.waiting:
        # An idle core sends no stats: what it reports now happened after the last point.
        seconds = min(seconds, interval)
    outputs, prompts = now.generated_tokens - before.generated_tokens, now.prompt_tokens - before.prompt_tokens
    return round(outputs / seconds, 1), round(prompts / seconds, 1)


def _prefix_hits(before: EngineStats | None, now: EngineStats | None) -> float | None:
    if before is None or now is None:
        return None
    looked_for = now.prefix_lookup_tokens - before.prefix_lookup_tokens
    return round((now.prefix_hit_tokens - before.prefix_hit_tokens) / looked_for, 4) if looked_for > 0 else None


def _latency_quantiles(found: Distribution, since: list[int]) -> LatencyQuantiles:
    count = sum(found.counts) - sum(since)
    p50, p95, p99 = (_rounded(found.quantile(share, since)) for share in (0.5, 0.95, 0.99))
    return LatencyQuantiles(count, p50, p95, p99)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.3g}")
