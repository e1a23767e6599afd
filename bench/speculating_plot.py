"""Draws what bench/speculating.py found: python bench/speculating_plot.py RESULTS.json PLOT.svg"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phonograph.bench.drawing import AMBER, BLUE, GREY, RED, check_plot, new_figure, save, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (BLUE, AMBER, RED, GREY)


def draw(results: Path, path: Path) -> None:
    """A panel for each part that was measured: tokens a round, times plain decoding by batch, the way up and down, the
    large shape against its goals."""
    check_plot(path)
    found = json.loads(results.read_text())
    figures = {name: part for name, part in found["figures"].items() if "failed" not in part}
    panels = [(name, way) for name, way in _PANELS.items() if name in figures]
    figure = new_figure(4.8 * max(1, len(panels)), 3.8)
    for axes, (name, way) in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False):
        way(axes, figures[name])
        tidy(axes)
    save(figure, f"Speculation, {found['machine'].get('accelerator', '')}", path)


def _rounds(axes: Axes, figures: dict[str, Any]) -> None:
    kinds = list(dict.fromkeys(kind for drafter in figures.values() for kind in drafter))
    width = 0.8 / len(figures)
    for number, (name, drafter) in enumerate(figures.items()):
        values = [drafter.get(kind, {}).get("tokens_a_round_with_or_without_drafts", 0.0) for kind in kinds]
        places = [place + number * width for place in range(len(kinds))]
        axes.bar(places, values, width, color=_COLORS[number % len(_COLORS)], label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(kinds))], kinds, fontsize=8)
    axes.set_ylabel("tokens a round")
    axes.legend(frameon=False, fontsize=8)


def _rates(axes: Axes, figures: dict[str, Any]) -> None:
    for number, (name, rates) in enumerate((name, part) for name, part in figures.items() if name != "plain"):
        batches = [batch for batch in rates if batch != "ratios"]
        times = [rates[batch]["times_plain"] for batch in batches]
        axes.plot(batches, times, "-o", markersize=3.5, color=_COLORS[number % len(_COLORS)], label=name)
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xlabel("sequences")
    axes.set_ylabel("times plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _curve(axes: Axes, figures: dict[str, Any]) -> None:
    batches = figures["batches"]
    for number, name in enumerate(name for name in figures["tokens_per_s"] if name != "plain"):
        axes.plot(figures[name]["times_plain"], "-o", markersize=3.5, color=_COLORS[number], label=f"{name}, pays")
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(batches)), [f"{batch}" for batch in batches], fontsize=8)
    axes.set_xlabel("sequences, up and down again")
    axes.set_ylabel("times plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _shape(axes: Axes, figures: dict[str, Any]) -> None:
    cases = {name: part for name, part in figures.items() if name != "plain"}
    axes.bar(range(len(cases)), [part["times_plain"] for part in cases.values()], 0.6, color=BLUE)
    for place, part in enumerate(cases.values()):
        axes.plot([place - 0.4, place + 0.4], [part["goal"]] * 2, color=RED, linewidth=1.4)
    axes.set_xticks(range(len(cases)), list(cases), fontsize=8)
    axes.set_ylabel("times plain decoding (red: goal)")


_PANELS = {"rounds": _rounds, "rates": _rates, "curve": _curve, "shape": _shape}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    arguments = parser.parse_args()
    draw(arguments.results, arguments.plot)
