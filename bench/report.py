"""Writes what a script measured, where and when, to bench/results/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phonograph.bench.report import command, machine, write_json

__all__ = ["RESULTS", "command", "machine", "write"]

RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """One JSON file per script and machine."""
    path = folder / f"{name}.json"
    write_json(path, {"machine": machine(), "figures": figures})
    return path
