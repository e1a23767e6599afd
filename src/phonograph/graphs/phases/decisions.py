"""Decisions: replay or run eagerly, as values with counted reasons."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum

from phonograph.graphs.phases.axes import PLAIN, Values

log = logging.getLogger("phonograph")

RecordingGroup = tuple[Values, frozenset[str]]
"""A product of the axes' values, and the keyed slots that are absent."""


class Reason(Enum):
    """Why a batch is run eagerly."""

    DISABLED = "disabled"
    """The phase's backend is `disabled`: it was asked for (`--graphs off`, `--PHASE-graph-backend disabled`), or a rule
    of the plan, which `explain` names, chose it."""
    TOO_LARGE = "too large"
    """The batch is larger than the largest bucket, or than a dim's limit: raise the buckets (`--PHASE-graph-limit`,
    `--PHASE-graph-buckets`; `buckets=` of `graphed`) or the limit (`Dim(limit=)`)."""
    TOO_SMALL = "too small"
    """The batch has fewer rows than the phase declares (`smallest=`), because fewer were said to be no legal batch.
    Lower it if they are one, or pad the batch yourself. No pass of the engine declares it."""
    OVER_PADDED = "over-padded"
    """The next bucket would waste more than `max_padding_ratio` and `max_padding_rows` allow: add a bucket
    (`--PHASE-graph-buckets`), or raise one of these (`--PHASE-graph-max-padding-ratio`, `-rows`)."""
    NOT_CAPTURED = "not captured"
    """There is no recording of this size: call `capture()`, or, with exact sizes (`--PHASE-graph-exact`), add this
    one."""
    CAPTURE_FAILED = "capture failed"
    """The recording of this bucket could not be made: `explain` has the op, the line and the remedy. Without memory:
    lower `--memory`, or make fewer recordings."""
    FEATURE_NOT_CAPTURED = "feature not captured"
    """The batch needs what no recording has. An argument that is no slot and has another value: make it a slot. A hook:
    call `capture()` again. A product of axes that was left out: raise `--PHASE-graph-max-recordings`. What a rule of
    `admission` refuses: the detail says why."""
    NOT_TRIMMED = "not trimmed"
    """Batches that do not fill this dim could not be tried at capture, so none of them is replayed: have
    the body and `sample=` take smaller sizes of the dim, or pass it filled, with a mask."""
    MISTRUSTED = "mistrusted"
    """A check in service (`--shadow-verify`) found this recording wrong, and released it. The log has the batch's
    difference; restart the server to record again."""
    DEBUG = "debug"
    """The plan asks for `debug` (`--graph-debug`): the body runs in the place of every replay. Leave it out."""
    STALE = "stale"
    """Something that the recording assumes has changed: restore it, or call `refresh()`. In a server it
    is a field of a batch that no recording has: a fault of a pass, which needs a report."""


@dataclass(frozen=True)
class ShapeKey:
    """Names one recording."""

    phase: str
    dim: str
    size: int
    values: Values = PLAIN
    """The values of the phase's axes that are not plain: which product this is a recording of."""
    absent: frozenset[str] = frozenset()
    """The keyed slots that have no value in this recording."""

    def __post_init__(self) -> None:
        # A key is looked up several times in every step.
        object.__setattr__(self, "_hash", hash((self.phase, self.dim, self.size, self.values, self.absent)))

    def __hash__(self) -> int:
        found: int = self._hash  # type: ignore[attr-defined]
        return found

    @property
    def group(self) -> RecordingGroup:
        """Product and absent slots: what it shares with the recordings of other sizes."""
        return self.values, self.absent

    @property
    def axes(self) -> str:
        """In words, what is not plain about its batches: `sampling=detailed, no mask`; empty for plain ones."""
        parts = [f"{axis}={value}" for axis, value in self.values]
        return ", ".join([*parts, *(f"no {name}" for name in sorted(self.absent))])

    @property
    def in_table_order(self) -> tuple[int, Values, list[str], int]:
        """The sort key of tables: recordings of fewer features come first."""
        return len(self.values), self.values, sorted(self.absent), self.size

    def __str__(self) -> str:
        return f"{self.phase}[{', '.join(filter(None, (f'{self.dim}={self.size}', self.axes)))}]"


@dataclass(frozen=True)
class Replay:
    """Replay this recording."""

    key: ShapeKey


@dataclass(frozen=True)
class RunEagerly:
    """Run without a graph, for this reason."""

    reason: Reason
    detail: str


Decision = Replay | RunEagerly


@dataclass(slots=True)
class ReplayCounts:
    """Counts of one recording: how often it was replayed, and for how many rows."""

    replays: int = 0
    used_rows: int = 0

    def add(self, used: int) -> None:
        """Count a replay for so many rows."""
        self.replays += 1
        self.used_rows += used

    def padding(self, size: int) -> float:
        """The share of the rows that was padding so far, of a recording of this size."""
        rows = self.replays * size
        return 1 - self.used_rows / rows if rows else 0.0


@dataclass
class Stats:
    """Counts of one runner: every call is a replay or has a reason."""

    recordings: defaultdict[ShapeKey, ReplayCounts] = field(default_factory=lambda: defaultdict(ReplayCounts))
    """Also of those that are released. Who replays a recording looks its counts up once and keeps them: to hash the key
    at every replay takes longer than to count."""
    eager: Counter[Reason] = field(default_factory=Counter)
    details: dict[Reason, str] = field(default_factory=dict)
    """The latest detail of each reason."""

    @property
    def num_replays(self) -> int:
        """Of all recordings."""
        return sum(counts.replays for counts in self.recordings.values())

    @property
    def replays(self) -> Counter[ShapeKey]:
        """By recording that was replayed; a copy."""
        return Counter({key: counts.replays for key, counts in self.recordings.items() if counts.replays})

    def count_eager(self, decision: RunEagerly, phase: str) -> None:
        """Count the call; the first for each reason is logged, except stale facts, which are logged one by one."""
        if decision.reason not in self.eager and decision.reason is not Reason.STALE:
            is_meant = decision.reason in (Reason.DISABLED, Reason.DEBUG)
            level = logging.INFO if is_meant else logging.WARNING
            log.log(level, "%s runs eagerly, %s: %s", phase, decision.reason.value, decision.detail)
        self.eager[decision.reason] += 1
        self.details[decision.reason] = decision.detail

    def clear(self) -> None:
        """Begin anew, with the same objects: recordings hold theirs."""
        for counts in self.recordings.values():
            counts.replays = counts.used_rows = 0
        self.eager.clear()
        self.details.clear()
