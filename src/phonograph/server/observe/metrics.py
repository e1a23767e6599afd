"""Metrics: counts and times of requests, and the newest stats of the engine core, for /metrics and the status page."""

from __future__ import annotations

from collections import Counter

from phonograph.engine.process.statistics import EngineStats
from phonograph.engine.process.traces import SequenceTrace
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.server.observe.histogram import Distribution
from phonograph.server.observe.request_book import RequestBook
from phonograph.server.observe.running_totals import StatsAcrossRestarts

# Bounds of what Prometheus is shown, in seconds and tokens.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_GAP = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.5,
    1,
    2.5,
)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """An observer of requests, and the holder of the cores' stats; all calls come from one event loop."""

    def __init__(self) -> None:
        self.first_token_seconds = Distribution(_FIRST_TOKEN)
        self.token_gap_seconds = Distribution(_TOKEN_GAP)
        self.request_seconds = Distribution(_WHOLE)
        self.prompt_tokens = Distribution(_TOKENS)
        self.output_tokens = Distribution(_TOKENS)
        self.num_started = 0
        self.num_finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.num_rejected: Counter[str] = Counter()
        self.core_stats = StatsAcrossRestarts()
        self.requests = RequestBook()

    @property
    def stats(self) -> EngineStats | None:
        """The newest stats, with counters summed over restarts of the core; None before the first."""
        return self.core_stats.total

    def take(self, stats: EngineStats, incarnation: int) -> None:
        """The newest stats of this incarnation of the core; they are numbered from 0."""
        self.core_stats.take(stats, incarnation)

    def started(self, request: Request) -> None:
        self.num_started += 1
        self.requests.started(request)

    def first_token(self, seconds: float) -> None:
        self.first_token_seconds.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self.token_gap_seconds.observe(seconds)

    def finished(
        self, reason: FinishReason, prompt_tokens: int, output_tokens: int, cached_tokens: int, seconds: float
    ) -> None:
        self.num_finished[reason.value] += 1
        self.request_seconds.observe(seconds)
        self.prompt_tokens.observe(prompt_tokens)
        self.output_tokens.observe(output_tokens)

    def traced(self, trace: SequenceTrace) -> None:
        self.requests.traced(trace)

    def rejected(self, reason: str) -> None:
        self.num_rejected[reason] += 1
