"""Restarts: counters of a core that was restarted are added up, so that none goes backwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import msgspec

from phonograph.engine.process.statistics import (
    EagerStats,
    EngineStats,
    PassTimeStats,
    PhaseStats,
    RecordingStats,
    SpeculationStats,
)

_COUNTERS = (
    "steps",
    "prompt_tokens",
    "prefill_tokens",
    "generated_tokens",
    "preemptions",
    "shadow_checks",
    "shadow_mismatches",
    "prefix_lookup_tokens",
    "prefix_hit_tokens",
)
_Part = TypeVar("_Part")


class StatsAcrossRestarts:
    """`total` has the gauges of the core that runs, and counters summed over all cores before it too."""

    def __init__(self) -> None:
        self._incarnation: int | None = None
        self._earlier: EngineStats | None = None
        self._total: EngineStats | None = None

    @property
    def total(self) -> EngineStats | None:
        """None before the first stats of the first core."""
        return self._total

    @property
    def restarts(self) -> int:
        """How often a core was followed by another one."""
        return self._incarnation or 0

    def take(self, stats: EngineStats, incarnation: int) -> None:
        """Take in the newest stats of a core by its incarnation, numbered from 0; those of an older one are dropped."""
        if self._incarnation is not None and incarnation < self._incarnation:
            return
        if self._incarnation is not None and incarnation > self._incarnation:
            self._earlier = self._total
        self._incarnation = incarnation
        self._total = stats if self._earlier is None else added(self._earlier, stats)

    def ended(self, incarnation: int) -> None:
        """This incarnation of the core died, with all that it was serving."""
        if self._incarnation == incarnation and self._total is not None:
            pages = self._total.total_pages
            self._total = msgspec.structs.replace(
                self._total, running=0, waiting=0, free_pages=pages, cached_pages=0, used_pages=0
            )


def added(earlier: EngineStats, now: EngineStats) -> EngineStats:
    """The current stats, with the counters of earlier incarnations added."""
    counters = {name: getattr(earlier, name) + getattr(now, name) for name in _COUNTERS}
    phases = _matched(earlier.phases, now.phases, lambda phase: phase.name, _add_phases)
    speculation = now.speculation
    if earlier.speculation is not None and speculation is not None:
        speculation = _add_speculation(earlier.speculation, speculation)
    return msgspec.structs.replace(now, phases=phases, speculation=speculation, **counters)


def _add_speculation(old: SpeculationStats, new: SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        old.rounds + new.rounds,
        old.tokens + new.tokens,
        tuple(map(sum, zip(old.drafted, new.drafted, strict=True))),
        tuple(map(sum, zip(old.accepted, new.accepted, strict=True))),
        {reason: old.plain.get(reason, 0) + count for reason, count in new.plain.items()},
        {kind: old.steps.get(kind, 0) + count for kind, count in new.steps.items()},
        {kind: _add_times(old.times.get(kind), new.times.get(kind)) for kind in {**old.times, **new.times}},
        old.probed + new.probed,
        old.probed_tokens + new.probed_tokens,
    )


def _add_times(*parts: PassTimeStats | None) -> PassTimeStats:
    found = [part for part in parts if part is not None]
    return PassTimeStats(sum(part.passes for part in found), sum(part.seconds for part in found))


def _add_phases(old: PhaseStats, new: PhaseStats) -> PhaseStats:
    seconds = {
        path: old.device_seconds.get(path, 0.0) + new.device_seconds.get(path, 0.0)
        for path in {**old.device_seconds, **new.device_seconds}
    }
    return msgspec.structs.replace(
        new,
        recordings=_matched(old.recordings, new.recordings, lambda recording: recording.label, _add_recordings),
        eager=_matched(old.eager, new.eager, lambda eager: eager.reason, _add_eager),
        device_seconds=seconds,
    )


def _add_recordings(old: RecordingStats, new: RecordingStats) -> RecordingStats:
    return msgspec.structs.replace(new, replays=old.replays + new.replays, used_rows=old.used_rows + new.used_rows)


def _add_eager(old: EagerStats, new: EagerStats) -> EagerStats:
    return msgspec.structs.replace(new, calls=old.calls + new.calls)


def _matched(
    old: Iterable[_Part],
    new: Iterable[_Part],
    name: Callable[[_Part], Hashable],
    add: Callable[[_Part, _Part], _Part],
) -> tuple[_Part, ...]:
    """Current parts, each with its earlier counterpart added, then earlier parts without a current one."""
    before = {name(part): part for part in old}
    found = [add(before.pop(name(part)), part) if name(part) in before else part for part in new]
    return (*found, *before.values())
