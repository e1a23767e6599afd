"""Progress: a bar that shows how far something long is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and how many there are."""

_WIDTH = 24
_QUIET_SECONDS = 10.0
"""Seconds between lines where the stream is not a terminal."""


def bar(stream: TextIO | None = None) -> Progress:
    """A line that is redrawn in place; where the stream is no terminal, a line every ten seconds and one at the end."""
    out = stream if stream is not None else sys.stderr
    live = out.isatty()
    told = time.monotonic()

    def show(doing: str, done: int, total: int) -> None:
        nonlocal told
        last = done == total
        filled = _WIDTH * done // max(1, total)
        line = f"{doing:<28.28} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}"
        if live:
            out.write(f"\r{line}{chr(10) if last else ''}")
            out.flush()
        elif last or time.monotonic() - told > _QUIET_SECONDS:
            told = time.monotonic()
            out.write(line + "\n")
            out.flush()

    return show


def silent(doing: str, done: int, total: int) -> None:
    """Shows nothing."""
