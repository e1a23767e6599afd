"""Recordings that serve, fitted to the sizes of the batches that come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phonograph.graphs.backends import Recording
from phonograph.graphs.buffers import Prepared, Registry
from phonograph.graphs.extent import Extent
from phonograph.graphs.outputs import trim
from phonograph.graphs.tree import Keep, Path

_MAX_FITTED = 512


@dataclass(frozen=True)
class Fitted:
    """A recording for one used size: all that is the same for every batch of that size."""

    extent: Extent
    prepared: Prepared
    outputs: Any
    """The used rows of the recording's outputs, as views."""


class Entry:
    """A recording that can be served, fitted to every used size met so far."""

    def __init__(
        self,
        recording: Recording,
        padded: dict[str, int],
        axes: dict[Path, dict[int, str]],
        carried: dict[str, Any],
        kept: Keep,
    ) -> None:
        self.recording = recording
        self.carried = carried
        self.padded = padded
        self.axes = axes
        self._kept = kept
        self._fitted: dict[tuple[int, ...], Fitted] = {}

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
