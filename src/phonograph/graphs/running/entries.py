"""Recording entries: recordings that serve, fitted to the sizes of the batches that come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.registry import Prepared, Registry
from phonograph.graphs.inputs.tree import Keep
from phonograph.graphs.phases.decisions import ReplayCounts, ShapeKey
from phonograph.graphs.recording.backends import Recording
from phonograph.graphs.recording.carried import Carried
from phonograph.graphs.recording.outputs import trim
from phonograph.graphs.recording.probing import Trimming

_MAX_FITTED = 512


@dataclass(frozen=True)
class Verified:
    """How much of a runner's recordings was checked against eager since they were made."""

    num_checks: int
    num_recordings: int
    summary: str


@dataclass(frozen=True)
class Loaded:
    """What the buffers hold: a recording's inputs, as they were loaded."""

    key: ShapeKey
    entry: RecordingEntry
    outputs: Any
    used: int
    num_loads: int


@dataclass(frozen=True)
class Fitted:
    """A recording for one used size: all that is the same for every batch of that size."""

    extent: Extent
    prepared: Prepared
    outputs: Any
    """The used rows of the recording's outputs, as views."""


class RecordingEntry:
    """A recording that can be served, fitted to every used size met so far."""

    def __init__(
        self,
        recording: Recording,
        padded: dict[str, int],
        trimming: Trimming,
        carried: Carried,
        kept: Keep,
        counts: ReplayCounts,
    ) -> None:
        self.recording = recording
        self.counts = counts
        self.carried = carried
        self.padded = padded
        self.axes = trimming.axes
        self.tried = trimming.tried
        self.must_fill = [name for name, sizes in trimming.tried.items() if not sizes]
        """Dims that a batch must fill: how to trim the outputs for less is unknown."""
        self._kept = kept
        self._fitted: dict[tuple[int, ...], Fitted] = {}

    def unfilled(self, used: Mapping[str, int]) -> str:
        """The dim that a batch would have to fill and does not, or nothing."""
        return next((name for name in self.must_fill if used[name] != self.padded[name]), "")

    def fitted(self, used: Mapping[str, int], registry: Registry, without: frozenset[str]) -> Fitted:
        """The recording for these used sizes; made once and kept."""
        key = tuple(used.values())
        found = self._fitted.get(key)
        if found is None:
            if len(self._fitted) >= _MAX_FITTED:
                self._fitted.clear()
            extent = Extent(used, self.padded)
            outputs = trim(self.recording.outputs, self.axes, used, self._kept)
            found = self._fitted[key] = Fitted(extent, registry.prepare(extent, without=without), outputs)
        return found
