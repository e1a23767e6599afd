"""Status: the server's state as one JSON document: model, throughput, latencies, eager steps and their reasons."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from phonograph.engine.process.health import Health
from phonograph.engine.process.messages import SpeculationInfo
from phonograph.engine.process.statistics import EngineStats, PhaseStats, SpeculationStats
from phonograph.server.observe.history import History, HistoryPoints, LatencyQuantiles
from phonograph.server.observe.incidents import Incident, Incidents
from phonograph.server.observe.metrics import Metrics
from phonograph.server.observe.request_book import RequestLine, RequestStory


class ServerInfo(msgspec.Struct, frozen=True):
    """What does not change while the server runs."""

    version: str
    model: str
    source: str
    """Where the weights come from."""
    architecture: str
    num_layers: int
    implementation: str
    """The model implementation: `native: …` or `hf: …`."""
    dtype: str
    device: str
    max_seqs: int
    max_tokens: int
    """Tokens of one step."""
    max_len: int
    speculation: SpeculationInfo | None = None
    """Who drafts, and when; None without speculation."""


class Latencies(msgspec.Struct, frozen=True):
    """Over the last minute, in seconds."""

    first_token: LatencyQuantiles
    token_gap: LatencyQuantiles
    request: LatencyQuantiles


class Cache(msgspec.Struct, frozen=True):
    """The KV cache, in pages; `cached` ones are held by the prefix cache alone and can be evicted."""

    page_size: int
    total: int
    used: int
    cached: int
    free: int
    lookup_tokens: int
    hit_tokens: int


class Totals(msgspec.Struct, frozen=True):
    """Since the server started, over all restarts of the core."""

    requests: int
    finished: dict[str, int]
    rejected: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    steps: int
    preemptions: int
    core_restarts: int
    shadow_checks: int
    """Replays that ran a second time, eagerly, to check them."""
    shadow_mismatches: int
    """Those whose replay was not bitwise equal."""


class Status(msgspec.Struct, frozen=True):
    """All that the status page shows."""

    facts: ServerInfo | None
    """None until the engine core is ready for the first time."""
    health: Health
    started: float
    """Unix time; if it changes, the server was restarted, and points are numbered from 0 again."""
    uptime: float
    running: int
    waiting: int
    latencies: Latencies
    cache: Cache | None
    totals: Totals
    phases: tuple[PhaseStats, ...]
    speculation: SpeculationStats | None
    """Acceptance of drafted tokens, reasons of plain steps, and device time; None without speculation."""
    incidents: tuple[Incident, ...]
    requests: tuple[RequestLine, ...]
    """The latest."""
    history: HistoryPoints


class StatusKeeper:
    """Makes the document; `tick` is called once a second."""

    def __init__(
        self,
        metrics: Metrics,
        facts: Callable[[], ServerInfo | None],
        health: Callable[[], Health],
        incidents: Incidents,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._facts = facts
        self._health = health
        self._incidents = incidents
        self._clock = clock
        self._history = History(metrics)
        self._started = clock()

    def tick(self) -> None:
        """Add a point to the history."""
        self._history.tick(self._clock())

    def status(self, since: int = 0) -> Status:
        """The status, with points of the history from this number on."""
        stats = self._metrics.stats
        return Status(
            facts=self._facts(),
            health=self._health(),
            started=round(self._started, 3),
            uptime=round(self._clock() - self._started, 1),
            running=stats.running if stats else 0,
            waiting=stats.waiting if stats else 0,
            latencies=Latencies(*self._history.latencies()),
            cache=_cache(stats) if stats else None,
            totals=self._totals(stats),
            phases=stats.phases if stats else (),
            speculation=stats.speculation if stats else None,
            incidents=self._incidents.newest(),
            requests=self._metrics.requests.newest(),
            history=self._history.since(since),
        )

    def story(self, request_id: str) -> RequestStory | None:
        """The details of a request; None if it is not kept."""
        return self._metrics.requests.story(request_id)

    def _totals(self, stats: EngineStats | None) -> Totals:
        metrics = self._metrics
        return Totals(
            requests=metrics.num_started,
            finished=dict(metrics.num_finished),
            rejected=dict(metrics.num_rejected),
            prompt_tokens=stats.prompt_tokens if stats else 0,
            generated_tokens=stats.generated_tokens if stats else 0,
            steps=stats.steps if stats else 0,
            preemptions=stats.preemptions if stats else 0,
            core_restarts=metrics.core_stats.restarts,
            shadow_checks=stats.shadow_checks if stats else 0,
            shadow_mismatches=stats.shadow_mismatches if stats else 0,
        )


def _cache(stats: EngineStats) -> Cache:
    return Cache(
        page_size=stats.page_size,
        total=stats.total_pages,
        used=stats.used_pages,
        cached=stats.total_pages - stats.free_pages - stats.used_pages,
        free=stats.free_pages,
        lookup_tokens=stats.prefix_lookup_tokens,
        hit_tokens=stats.prefix_hit_tokens,
    )
