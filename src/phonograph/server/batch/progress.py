"""Batch progress: a bar on a terminal, a line now and then elsewhere, and the lines that failed."""

from __future__ import annotations

import time
from typing import TextIO

from phonograph.server.batch.running import Tally

_WIDTH = 24
_DRAWN_SECONDS = 0.1
_QUIET_SECONDS = 10.0
"""Seconds between lines where the stream is not a terminal."""
_MOST_REPORTS = 20


class BatchProgress:
    """Progress of a run, written to one stream."""

    def __init__(self, stream: TextIO, total: int | None) -> None:
        """`total` lines are to be answered; None where that is unknown."""
        self._stream = stream
        self._total = total
        self._is_live = stream.isatty()
        self._told = self._begun = time.monotonic()
        self._reports = 0

    def show(self, tally: Tally) -> None:
        """Redraw, at most once per interval."""
        now, pause = time.monotonic(), _DRAWN_SECONDS if self._is_live else _QUIET_SECONDS
        if now - self._told >= pause:
            self._told = now
            self._draw(tally, end="" if self._is_live else "\n")

    def report(self, failed: str) -> None:
        """Report an input line that failed; only the first few, since the output file has them all."""
        self._reports += 1
        if self._reports <= _MOST_REPORTS:
            self._clear()
            self._stream.write(f"{failed}\n")
        if self._reports == _MOST_REPORTS:
            self._stream.write("further failures are in the output file only\n")

    def end(self, tally: Tally, how: str) -> None:
        """The last line."""
        self._clear()
        seconds = time.monotonic() - self._begun
        skipped = f", {tally.skipped} had been before" if tally.skipped else ""
        self._stream.write(f"{how}: {tally.succeeded} answered, {tally.failed} failed{skipped}, in {seconds:.1f} s\n")
        self._stream.flush()

    def _draw(self, tally: Tally, end: str) -> None:
        failed = f", {tally.failed} failed" if tally.failed else ""
        if self._total is None:
            line = f"requests  {tally.done}{failed}"
        else:
            filled = min(_WIDTH, _WIDTH * tally.done // max(1, self._total))
            line = f"requests  [{'#' * filled}{'.' * (_WIDTH - filled)}] {tally.done}/{self._total}{failed}"
        self._clear()
        self._stream.write(line + end)
        self._stream.flush()

    def _clear(self) -> None:
        if self._is_live:
            self._stream.write("\r\033[K")
