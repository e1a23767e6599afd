"""Plot of a load test: throughput and running requests over time, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phonograph.bench.drawing import AMBER, BLUE, GREY, RED, new_figure, save, tidy
from phonograph.bench.serving.outcome import Outcome
from phonograph.bench.serving.summary import LatencySummary, Summary, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 120


def draw(outcomes: Sequence[Outcome], summary: Summary, title: str, path: Path) -> None:
    """Write the plot; the file's name says whether SVG or PNG."""
    figure = new_figure(10, 7)
    panels = figure.subplot_mosaic([["time"] * 3, ["first", "gap", "whole"]])
    _draw_time(panels["time"], outcomes)
    done = [one for one in outcomes if not one.error]
    gaps = [gap for one in done for gap in one.token_gaps()]
    for axes, name, values, weights, found in (
        (panels["first"], "time to first token", [one.first_token_seconds for one in done], None, summary.first_token),
        (panels["gap"], "inter-token latency", [v for v, _ in gaps], [w for _, w in gaps], summary.token_gap),
        (panels["whole"], "end to end", [one.seconds for one in done], None, summary.request),
    ):
        _draw_share(axes, name, np.asarray(values), weights, found)
    save(figure, title, path)


def _draw_time(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    end = max((one.end for one in outcomes), default=0.0) or 1.0
    width = max(end / _BINS, 0.05)
    edges = np.arange(0.0, end + width, width)
    times = [time for one in outcomes for time, _ in one.arrivals]
    tokens = [
        count * one.output_tokens / one.num_events if one.num_events else 0.0
        for one in outcomes
        for _, count in one.arrivals
    ]
    rates = np.histogram(times, edges, weights=tokens)[0] / width
    axes.stairs(rates, edges, color=BLUE, fill=True, alpha=0.25)
    axes.stairs(rates, edges, color=BLUE, linewidth=1.2)
    axes.set_ylabel("output tokens/s", color=BLUE)
    axes.set_xlabel("seconds")
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)
    running = axes.twinx()
    moments, counts = _running(outcomes)
    running.step(moments, counts, where="post", color=AMBER, linewidth=1.2)
    running.set_ylabel("requests running", color=AMBER)
    running.set_ylim(bottom=0)
    failed = [one.end for one in outcomes if one.error]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=RED, markersize=5, clip_on=False, label=f"{len(failed)} failed")
        axes.legend(loc="upper right", frameon=False, fontsize=9)
    tidy(axes)
    running.spines[["top", "left"]].set_visible(False)


def _running(outcomes: Sequence[Outcome]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How many requests are under way from each moment on."""
    moments = np.array([one.sent for one in outcomes] + [one.end for one in outcomes])
    changes = np.array([1] * len(outcomes) + [-1] * len(outcomes), dtype=np.int64)
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(changes[order])


def _draw_share(
    axes: Axes, name: str, values: NDArray[np.float64], weights: Sequence[float] | None, found: LatencySummary | None
) -> None:
    """The share of values that are not above x, with the percentiles marked."""
    axes.set_title(name, fontsize=9, color=GREY, loc="left")
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share not above", fontsize=9, color=GREY)
    tidy(axes)
    if found is None:
        axes.text(0.5, 0.5, "nothing", ha="center", transform=axes.transAxes, color=GREY)
        return
    order = np.argsort(values)
    often = np.ones_like(values) if weights is None else np.asarray(weights)
    reached = np.cumsum(often[order]) / often.sum()
    # A tail of a few extreme values would squeeze all others together.
    scale, unit = (1000.0, "ms") if found.p99 < 1 else (1.0, "s")
    axes.step(values[order] * scale, reached, where="post", color=BLUE)
    axes.set_xlim(0, max(found.p99 * 1.25, found.highest if found.highest < 2 * found.p99 else 0) * scale)
    axes.set_xlabel(unit)
    for share, value in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        axes.plot([value * scale] * 2, [0, share], color=GREY, linewidth=0.8, linestyle=":")
        axes.plot([value * scale], [share], "o", color=AMBER, markersize=4)
    figures = f"p50 {shown(found.p50)}, p95 {shown(found.p95)}, p99 {shown(found.p99)}"
    axes.set_title(f"{name}\n{figures}", fontsize=9, color=GREY, loc="left")
