"""Plots of a report: a line for every series over sizes, or bars where cases have names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phonograph.bench.drawing import new_figure, save, tidy
from phonograph.bench.report import Kind, Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: dict[Kind, tuple[str, ...]] = {
    "floor": ("#8a8f98",),
    "eager": ("#b3261e",),
    "ours": ("#2f62d9", "#7a5af5", "#0f8b8d"),
    "peer": ("#b45309", "#5b7f1b", "#8c4a7f", "#444b57"),
}
_ORDER: tuple[Kind, ...] = ("floor", "eager", "ours", "peer")
_COLUMNS = 4
_LOG_RATIO = 8
"""Sizes and values that are further apart than this are drawn on logarithmic axes."""


def draw(report: Report, path: Path) -> None:
    """Write a plot; the file's name says whether SVG or PNG."""
    panels = _panels(report)
    columns = len(panels) if len(panels) < 3 else 2 if len(panels) <= 4 else _COLUMNS
    lines = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns + 0.6, 3.4 * lines + 0.8)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for one, (title, rows) in zip(axes, panels.items(), strict=False):
        _draw_panel(one, report, title, rows)
    for one in axes[len(panels) :]:
        one.set_visible(False)
    where = report.where["accelerator"]
    save(figure, f"{report.subject.title}: {report.settings.get('shape', '')}, {where}", path)


def _panels(report: Report) -> dict[str, list[Row]]:
    """Rows by all of their case but its size; cases without a size share one panel."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        rest = list(row.case.items())[1:] if _has_size(row) else []
        found.setdefault(", ".join(f"{name} {value}" for name, value in rest), []).append(row)
    return found


def _has_size(row: Row) -> bool:
    return isinstance(next(iter(row.case.values())), int)


def _draw_panel(axes: Axes, report: Report, title: str, rows: list[Row]) -> None:
    series = [name for kind in _ORDER for name in dict.fromkeys(row.series for row in rows if row.kind == kind)]
    colors = _series_colors(rows)
    if _has_size(rows[0]):
        _draw_lines(axes, rows, series, colors)
        axes.set_xlabel(next(iter(rows[0].case)))
    else:
        _draw_bars(axes, rows, series, colors)
    axes.set_ylabel(report.subject.unit)
    axes.set_title(title, fontsize=9, loc="left")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)


def _series_colors(rows: list[Row]) -> dict[str, str]:
    colors: dict[str, str] = {}
    for kind, palette in _COLORS.items():
        for index, name in enumerate(dict.fromkeys(row.series for row in rows if row.kind == kind)):
            colors[name] = palette[index % len(palette)]
    return colors


def _draw_lines(axes: Axes, rows: list[Row], series: list[str], colors: dict[str, str]) -> None:
    key = next(iter(rows[0].case))
    for name in series:
        points = sorted((int(row.case[key]), row.value) for row in rows if row.series == name)
        style = "--" if any(row.series == name and row.kind == "floor" for row in rows) else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3.5, color=colors[name], label=name)
    sizes, values = [int(row.case[key]) for row in rows], [row.value for row in rows if row.value > 0]
    if max(sizes) / max(1, min(sizes)) > _LOG_RATIO:
        axes.set_xscale("log", base=2)
        ticks = sorted(set(sizes))
        axes.set_xticks(ticks, [f"{tick}" for tick in ticks], fontsize=8, rotation=45 if len(ticks) > 6 else 0)
    if values and max(values) / min(values) > _LOG_RATIO:
        _set_log(axes)
    else:
        axes.set_ylim(bottom=0)


def _set_log(axes: Axes) -> None:
    """A logarithmic axis with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _case(row: Row) -> str:
    return str(next(iter(row.case.values())))


def _draw_bars(axes: Axes, rows: list[Row], series: list[str], colors: dict[str, str]) -> None:
    names = list(dict.fromkeys(_case(row) for row in rows))
    present = {
        name: [s for s in series if any(_case(row) == name and row.series == s for row in rows)] for name in names
    }
    width = 0.8 / max(len(shown) for shown in present.values())
    for name in series:
        found = {_case(row): row.value for row in rows if row.series == name}
        # The bars of a case stand together around its place, however many series it has.
        places = {case: present[case].index(name) - (len(present[case]) - 1) / 2 for case in found}
        axes.bar(
            [names.index(case) + place * width for case, place in places.items()],
            list(found.values()),
            width,
            color=colors[name],
            label=name,
        )
    turned = len(names) > 3
    axes.set_xticks(
        range(len(names)), names, fontsize=8, rotation=20 if turned else 0, ha="right" if turned else "center"
    )
    values = [row.value for row in rows if row.value > 0]
    if values and max(values) / min(values) > 10 * _LOG_RATIO:
        _set_log(axes)
    else:
        axes.margins(y=0.2)  # room for the legend
