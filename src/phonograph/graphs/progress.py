"""Progress: a bar that shows how far a capture is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and how many there are."""

_WIDTH = 24


def bar(stream: TextIO | None = None) -> Progress:
    """A line that is drawn over itself; on a stream that is no terminal, one line at the end."""
    out = stream if stream is not None else sys.stderr
    live = out.isatty()

    def show(doing: str, done: int, total: int) -> None:
        last = done == total
        filled = _WIDTH * done // max(1, total)
        line = f"{doing:<28.28} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}"
        if live:
            out.write(f"\r{line}{chr(10) if last else ''}")
            out.flush()
        elif last:
            out.write(line + "\n")

    return show


def silent(doing: str, done: int, total: int) -> None:
    """Shows nothing."""
