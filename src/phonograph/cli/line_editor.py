"""LineEditor: reads messages from a terminal, with a saved history and multi-line input."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_MOST_LINES = 1000
_MARK = '"""'
"""Begins and ends a message of several lines."""


class LineEditor:
    """Reads messages; where the input is a terminal, with readline, and a history in a file of the user's own."""

    def __init__(self, history: Path | None = None) -> None:
        self._readline = _readline() if sys.stdin.isatty() else None
        self._history = history if self._readline is not None else None
        if self._readline is not None and self._history is not None:
            with suppress(OSError):
                self._readline.read_history_file(str(self._history))
            self._readline.set_history_length(_MOST_LINES)

    @property
    def typed(self) -> str:
        """The text on the line when it was interrupted."""
        return self._readline.get_line_buffer() if self._readline is not None else ""

    def read(self, prompt: str = "> ", more: str = "… ") -> str:
        """The next message; EOFError at the end of the input.

        A line that ends in a backslash goes on in the next; what is between two marks may have any lines.
        """
        line = input(prompt)
        if line.lstrip().startswith(_MARK):
            return self._block(line.lstrip().removeprefix(_MARK), more)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(more))
        return "\n".join(lines)

    def _block(self, line: str, more: str) -> str:
        lines = []
        while not line.rstrip().endswith(_MARK):
            lines.append(line)
            line = input(more)
        lines.append(line.rstrip().removesuffix(_MARK))
        return "\n".join(lines).strip("\n")

    def save(self) -> None:
        """Write the history, for this user alone; a folder that can't be written to keeps none."""
        if self._readline is None or self._history is None:
            return
        with suppress(OSError):
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600)
            os.close(descriptor)
            self._readline.write_history_file(str(self._history))


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Windows has none
        return None
    return readline
