"""`phonograph bench table`: tables and plots of a page from the reports in a folder, so that none is typed by hand."""

from __future__ import annotations

import os
import re
from pathlib import Path

from phonograph.bench.peers import join, results_in
from phonograph.bench.plots import draw
from phonograph.bench.report import Report, read_report
from phonograph.bench.tables import markdown
from phonograph.errors import PlanError

_SECTION = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def reports_in(folder: Path) -> dict[str, Report]:
    """The reports of a folder by name, with the results of peers in the same folder."""
    if not folder.is_dir():
        raise PlanError(f"reading results: {folder} is no folder. Make one with `phonograph bench … --out {folder}`.")
    peers = results_in(folder)
    reports = {}
    for path in sorted(folder.glob("*.json")):
        report = read_report(path)
        if report is not None:
            report.path = path
            join(report, peers)
            reports[report.subject.name] = report
    return reports


def make_pages(folder: Path, page: Path | None, plots: Path | None) -> int:
    """Draw plots where they are wanted; fill the page, or print all tables."""
    reports = reports_in(folder)
    if not reports:
        raise PlanError(f"reading results: {folder} has none. Make some with `phonograph bench … --out {folder}`.")
    if plots is not None:
        draw_all(reports, plots)
    if page is None:
        for report in reports.values():
            print(f"## {report.subject.title}\n\n{markdown(report)}\n")
        return 0
    # Plots are named as a reader of the page finds them.
    named = "" if plots is None else os.path.relpath(plots, page.parent)
    page.write_text(fill(page.read_text(), reports, Path(named).as_posix() if named else ""))
    return 0


def fill(page: str, reports: dict[str, Report], plots: str = "") -> str:
    """The page with the sections between `<!-- bench: NAME -->` and `<!-- end -->` made anew.

    Sections without a report stay as they are; `plots` is the folder of plots as the page names it.
    """

    def section(found: re.Match[str]) -> str:
        name = found[2]
        if name not in reports:
            return found[0]
        plot = f"![{reports[name].subject.title}]({plots}/{name}.svg)\n\n" if plots and reports[name].rows else ""
        return f"{found[1]}\n{markdown(reports[name])}\n\n{plot}{found[3]}"

    return _SECTION.sub(section, page)


def draw_all(reports: dict[str, Report], folder: Path) -> list[Path]:
    """A plot of every report."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, report in reports.items():
        if report.rows:
            paths.append(folder / f"{name}.svg")
            draw(report, paths[-1])
    return paths
