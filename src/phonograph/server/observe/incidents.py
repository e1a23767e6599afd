"""Incidents: the latest warnings and errors of the log, for the status page."""

from __future__ import annotations

import logging
import re

import msgspec

_KEPT = 50
_MAX_CHARS = 500
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|[-\w]*\d[-\w.]*")
"""Parts in which two incidents of a kind may differ: quoted text, numbers, and names with numbers in them."""


class Incident(msgspec.Struct, frozen=True):
    """A warning or an error, and how often its kind occurred; the text is the latest's."""

    at: float
    """Unix time of the latest."""
    level: str
    text: str
    count: int = 1


class Incidents(logging.Handler):
    """A logging handler: keeps the newest records of level WARNING and above; repeats of a kind are only counted.

    Two records are of a kind if their texts differ only in numbers and quoted parts: a flood of one kind takes one
    place, and evicts nothing else.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: dict[tuple[str, str], Incident] = {}
        """By level and kind, the newest last."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; its text is one that the log has too, so nothing is shown that is not logged."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        text = text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
        level = record.levelname.lower()
        kind = level, _VARIABLE.sub("#", text)
        before = self._kept.pop(kind, None)
        self._kept[kind] = Incident(round(record.created, 2), level, text, 1 + (before.count if before else 0))
        if len(self._kept) > _KEPT:  # the oldest warning is evicted before any error
            del self._kept[next((old for old in self._kept if old[0] == "warning"), next(iter(self._kept)))]

    def newest(self) -> tuple[Incident, ...]:
        """The newest first."""
        self.acquire()  # another thread may be logging
        try:
            return tuple(reversed(self._kept.values()))
        finally:
            self.release()
