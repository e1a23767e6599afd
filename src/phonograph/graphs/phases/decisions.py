"""Decisions: replay or run eagerly, as values with reasons, and each reason is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from phonograph.graphs.phases.axes import PLAIN, Values

RecordingGroup = tuple[Values, frozenset[str]]
"""A product of the axes' values, and the keyed slots that are absent."""


class Reason(Enum):
    """Why a batch is run eagerly."""

    DISABLED = "disabled"
    TOO_LARGE = "too large"
    OVER_PADDED = "over-padded"
    NOT_CAPTURED = "not captured"
    CAPTURE_FAILED = "capture failed"
    FEATURE_NOT_CAPTURED = "feature not captured"
    NOT_TRIMMED = "not trimmed"
    MISTRUSTED = "mistrusted"
    DEBUG = "debug"


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
        """What tables sort recordings by: those of fewer features come first."""
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


@dataclass
class Stats:
    """Counts of one runner: every call is a replay or has a reason."""

    replays: Counter[ShapeKey] = field(default_factory=Counter)
    used_rows: Counter[ShapeKey] = field(default_factory=Counter)
    eager: Counter[Reason] = field(default_factory=Counter)
    details: dict[Reason, str] = field(default_factory=dict)
    """The latest detail of each reason."""

    def count_replay(self, key: ShapeKey, used: int) -> None:
        self.replays[key] += 1
        self.used_rows[key] += used

    def count_eager(self, decision: RunEagerly) -> None:
        self.eager[decision.reason] += 1
        self.details[decision.reason] = decision.detail

    def padding(self, key: ShapeKey) -> float:
        """The share of a recording's rows that was padding so far."""
        rows = self.replays[key] * key.size
        return 1 - self.used_rows[key] / rows if rows else 0.0
