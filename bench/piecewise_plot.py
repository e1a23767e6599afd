"""Draws what bench/piecewise.py found, natively and through the adapter:
python bench/piecewise_plot.py RESULTS.json PLOT.svg"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phonograph.bench.drawing import AMBER, BLUE, check_plot, new_figure, save, tidy

Line = dict[str, Any]
BACKENDS = ("full", "breakable", "tc_piecewise", "disabled")
KINDS = {"native": BLUE, "adapter": AMBER}
PANELS: dict[str, Callable[[Line], float]] = {
    "decode of 1 sequence, ms": lambda line: line["decode"]["1"]["wall_ms"],
    "decode of 32 sequences, ms": lambda line: line["decode"]["32"]["wall_ms"],
    "prefill of 128 tokens, ms": lambda line: line["prefill"]["1 of 128"]["device_ms"],
    "W1, tokens a second": lambda line: line["w1_tokens_s"][-1],
}


def draw(results: Path, path: Path) -> None:
    """A panel for each figure, a bar for each backend: layers of our own beside those of transformers."""
    check_plot(path)
    found = json.loads(results.read_text())
    lines = {line["label"].removesuffix(" warm"): line for line in found["lines"] if "decode" in line}
    figure = new_figure(9.6, 6.4)
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for number, (kind, color) in enumerate(KINDS.items()):
            there = [place for place, name in enumerate(BACKENDS) if f"{kind} {name}" in lines]
            values = [value(lines[f"{kind} {BACKENDS[place]}"]) for place in there]
            bars = axes.bar([place + 0.4 * number for place in there], values, 0.38, color=color, label=kind)
            axes.bar_label(bars, [f"{one:,.0f}" if one > 100 else f"{one:.3g}" for one in values], fontsize=7)
        axes.set_xticks([place + 0.2 for place in range(len(BACKENDS))], BACKENDS, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.margins(y=0.12)
        tidy(axes)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="upper right", frameon=False, fontsize=8)
    save(figure, f"Backends, Qwen3-8B shape, {found['machine']['accelerator']}", path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    arguments = parser.parse_args()
    draw(arguments.results, arguments.plot)
