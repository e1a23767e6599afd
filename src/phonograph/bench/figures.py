"""Statistics of samples: medians, nearest-rank percentiles, ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Better = Literal["lower", "higher"]
PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], percent: float, weights: Sequence[float] | None = None) -> float:
    """The nearest-rank percentile; a weight says how often a value counts."""
    found = np.asarray(values, dtype=np.float64)
    often = np.ones_like(found) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(found, kind="stable")
    reached = np.cumsum(often[order])
    # A hair below the share: sums of fractions must not push an exact rank to the next value.
    place = int(np.searchsorted(reached, percent / 100 * reached[-1] * (1 - 1e-12)))
    return float(found[order[min(place, len(found) - 1)]])


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """p50, p95 and p99, each times `scale`; nothing for no values."""
    return {f"p{percent}": rounded(percentile(values, percent) * scale) for percent in PERCENTILES} if values else {}


def speedup(ours: float, other: float, better: Better) -> float | None:
    """How many times better ours is; None where a figure is missing or zero."""
    above, below = (other, ours) if better == "lower" else (ours, other)
    return ratio(above, below)


def ratio(above: float, below: float) -> float | None:
    """None where it would say nothing."""
    if not (math.isfinite(above) and math.isfinite(below)) or below == 0:
        return None
    return above / below


def rounded(value: float, digits: int = 4) -> float:
    """To a number of significant digits, as results are written; integers above that stay whole."""
    if value == 0 or not math.isfinite(value):
        return value
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return round(value, max(places, 0))


@dataclass(frozen=True)
class Spread:
    """A median, and how far the values scatter around it."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float], scale: float = 1.0) -> Spread:
        middle = statistics.median(values)
        p10, p90 = percentile(values, 10), percentile(values, 90)
        return Spread(*(rounded(value * scale) for value in (middle, p10, p90)))
