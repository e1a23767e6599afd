"""Histogram whose snapshots subtract: cheap to feed, and the distribution between any two moments is a difference."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_STEPS_PER_DECADE = 24


class Distribution:
    """Counts values in narrow buckets, a tenth wide; a few of their bounds are published.

    Prometheus gets the published bounds, quantiles of a time span come from the narrow ones.
    """

    def __init__(self, published: Sequence[float]) -> None:
        self.published = tuple(published)
        self.bounds = _narrow(self.published)
        self.counts = [0] * (len(self.bounds) + 1)
        """Of each bucket, not cumulative; the last is above every bound."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, number of values up to it) for the published bounds and infinity."""
        sums = list(accumulate(self.counts))
        places = [bisect_left(self.bounds, bound) for bound in self.published]
        return [(str(float(b)), float(sums[p])) for b, p in zip(self.published, places, strict=True)] + [
            ("+Inf", float(sums[-1]))
        ]

    def quantile(self, share: float, since: Sequence[int] = ()) -> float | None:
        """The quantile of all values, or of those after the snapshot `since`; interpolated within its bucket."""
        counts = [now - before for now, before in zip(self.counts, since, strict=True)] if since else self.counts
        wanted = share * sum(counts)
        if wanted <= 0:
            return None
        seen = 0.0
        for index, count in enumerate(counts):
            if count and seen + count >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[index] if index < len(self.bounds) else self.bounds[-1]
                return low + (high - low) * (wanted - seen) / count
            seen += count
        return self.bounds[-1]


def _narrow(published: Sequence[float]) -> tuple[float, ...]:
    """The published bounds, and steps of a tenth between and around them."""
    low, high = published[0] / 10, published[-1]
    bounds = set(published)
    value = low
    while value < high:
        bounds.add(value)
        value *= 10 ** (1 / _STEPS_PER_DECADE)
    return tuple(sorted(bounds))
