"""The latest warnings and errors of the log, for the status page."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

_KEPT = 50
_MAX_CHARS = 500


class Incident(msgspec.Struct, frozen=True):
    """A warning or an error, and how often it came in a row."""

    at: float
    """Unix time of the latest."""
    level: str
    text: str
    count: int = 1


class Incidents(logging.Handler):
    """A handler for a logger: keeps the newest records from warning on; the same one again only counts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[Incident] = deque(maxlen=_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; its text is one that the log has too, so nothing is shown that is not logged."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        text = text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
        level = record.levelname.lower()
        count = 1
        if self._kept and (self._kept[-1].level, self._kept[-1].text) == (level, text):
            count += self._kept.pop().count
        self._kept.append(Incident(round(record.created, 2), level, text, count))

    def newest(self) -> tuple[Incident, ...]:
        """The newest first."""
        self.acquire()  # another thread may be logging
        try:
            return tuple(reversed(self._kept))
        finally:
            self.release()
