"""Tables of reports: a line for every case, a column for every series, and their ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from phonograph.bench.figures import ratio, rounded, speedup
from phonograph.bench.report import Kind, Report, Row

T = TypeVar("T")
Cells = list[list[str]]
_ORDER: tuple[Kind, ...] = ("floor", "eager", "ours", "peer")


def main_table(report: Report) -> Cells:
    """Values by case and series, then ratios: ours to the floor, and how many times better than eager and peers."""
    cases = _unique(tuple(row.case.items()) for row in report.rows)
    keys = _unique(key for case in cases for key, _ in case)
    series = [name for kind in _ORDER for name in _unique(r.series for r in report.rows if r.kind == kind)]
    kinds = {row.series: row.kind for row in report.rows}
    ours = [name for name in series if kinds[name] == "ours"]
    columns = _ratio_columns(series, ours, kinds)
    unit = report.subject.unit
    table = [[*keys, *(f"{name}, {unit}" for name in series), *(_heading(*column, report) for column in columns)]]
    for case in cases:
        found = {row.series: row for row in report.rows if tuple(row.case.items()) == case}
        named = dict(case)
        line = [str(named.get(key, "")) for key in keys]
        line += [shown(found[name].value) if name in found else "" for name in series]
        line += [_ratio_cell(found, one, other, kinds[other], report) for one, other in columns]
        table.append(line)
    return table


def detail_table(report: Report) -> Cells:
    """All other figures, a line for every row that has any."""
    rows = [row for row in report.rows if _plain(row)]
    names = _unique(name for row in rows for name in _plain(row))
    keys = _unique(key for row in rows for key in row.case)
    if not rows:
        return []
    table = [[*keys, "series", *(name.replace("_", " ") for name in names)]]
    for row in rows:
        figures = _plain(row)
        table.append(
            [*(str(row.case.get(key, "")) for key in keys), row.series, *(shown(figures.get(n)) for n in names)]
        )
    return table


def as_text(cells: Cells) -> str:
    """Aligned columns for a terminal."""
    widths = [max(len(line[index]) for line in cells) for index in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def as_markdown(cells: Cells) -> str:
    """A table of a Markdown page."""
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], f"|{' --- |' * len(cells[0])}", *lines[1:]])


def printed(report: Report) -> str:
    """A report for a terminal."""
    parts = [f"{report.subject.title} ({report.where['accelerator']}, {_settings(report)})"]
    if report.rows:
        parts.append(as_text(main_table(report)))
    if details := detail_table(report):
        parts.append(as_text(details))
    parts += [_fact(name, value, as_text) for name, value in report.facts.items()]
    parts += [f"* {note}" for note in ([report.subject.how] if report.subject.how else []) + report.notes]
    return "\n\n".join(parts)


def markdown(report: Report) -> str:
    """A report for a page: the table, what it was measured with, and notes."""
    where = report.where
    parts = [as_markdown(main_table(report))] if report.rows else []
    details = [as_markdown(cells)] if (cells := detail_table(report)) else []
    details += [_fact(name, value, as_markdown) for name, value in report.facts.items()]
    if details:
        parts.append("\n\n".join(["<details><summary>All figures</summary>", *details, "</details>"]))
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "torch", "triton", "cuda") if name in where)
    parts.append(
        f"{where['accelerator']}, {versions}; {_settings(report)}; {where['date']}; `{where['command']}`"
        + ("" if report.status == "complete" else f"; status: {report.status}")
    )
    notes = ([report.subject.how] if report.subject.how else []) + report.notes
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def shown(value: Any) -> str:
    """A figure as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{rounded(value, 4):g}"


def fact_tables(value: Mapping[str, Any]) -> list[Cells]:
    """A fact of several parts as tables: one of all that fits in cells, and one for every part that has parts."""
    if not all(isinstance(part, Mapping) for part in value.values()):
        return [[["", "value"], *([name, shown(part)] for name, part in value.items())]]
    names = _unique(name for part in value.values() for name, one in part.items() if not isinstance(one, Mapping))
    whole = [["", *(name.replace("_", " ") for name in names)]]
    whole += [[key, *(shown(part.get(name)) for name in names)] for key, part in value.items()]
    nested = [
        [[f"{key}: {name.replace('_', ' ')}", "value"], *([inner, shown(one)] for inner, one in found.items())]
        for key, part in value.items()
        for name, found in part.items()
        if isinstance(found, Mapping)
    ]
    return [whole, *nested]


def _fact(name: str, value: Any, draw: Callable[[Cells], str]) -> str:
    title = name.replace("_", " ")
    if not isinstance(value, Mapping):
        return f"{title}: {shown(value)}"
    return "\n\n".join([f"{title}:", *(draw(cells) for cells in fact_tables(value))])


def _ratio_columns(series: Sequence[str], ours: Sequence[str], kinds: dict[str, Kind]) -> list[tuple[str, str]]:
    """(ours, other): every backend to the floor, and the first one to all else."""
    columns = [(one, other) for one in ours for other in series if kinds[other] == "floor"]
    if ours:
        columns += [(ours[0], other) for other in series if kinds[other] in ("eager", "peer")]
    return columns


def _heading(one: str, other: str, report: Report) -> str:
    if any(row.series == other and row.kind == "floor" for row in report.rows):
        return f"{one} / {other}"
    return f"{other} / {one}" if report.subject.better == "lower" else f"{one} / {other}"


def _ratio_cell(found: dict[str, Row], one: str, other: str, kind: Kind, report: Report) -> str:
    if one not in found or other not in found:
        return ""
    ours, theirs = found[one].value, found[other].value
    value = ratio(ours, theirs) if kind == "floor" else speedup(ours, theirs, report.subject.better)
    return "" if value is None else f"{value:.2f}×"


def _plain(row: Row) -> dict[str, Any]:
    """Figures that fit in a cell."""
    return {name: value for name, value in row.figures.items() if not isinstance(value, dict | list)}


def _settings(report: Report) -> str:
    return ", ".join(f"{name} {value}" for name, value in report.settings.items() if value not in (None, "", {}))


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
