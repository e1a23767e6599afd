"""Drawing: what all plots have in common, so that they look alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phonograph.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, AMBER, GREY, RED = "#2f62d9", "#b45309", "#566074", "#b3261e"


def check_plot(path: Path) -> None:
    """Raise before anything is measured if its plot could not be drawn afterwards."""
    if path.suffix not in (".svg", ".png"):
        raise PlanError(f"--plot {path}: expected a name that ends in .svg or .png.")
    if not path.parent.is_dir():
        raise PlanError(f"--plot {path}: the folder {path.parent} does not exist. Make it first.")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("drawing a plot needs matplotlib. Run: pip install 'phonograph[bench]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, title: str, path: Path) -> None:
    """Write the figure; the file's name says whether SVG or PNG."""
    figure.suptitle(title, fontsize=11, color="#171b24")
    figure.savefig(path, dpi=130)


def tidy(axes: Axes) -> None:
    """Lines that help, and none that do not."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e1e4ea", linewidth=0.7)
    axes.set_axisbelow(True)
