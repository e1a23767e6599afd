"""Stale recordings: a fact that a recording took for granted has changed, so calls run eagerly until it is back."""

from __future__ import annotations

import logging

from phonograph.graphs.phases.decisions import Reason, RunEagerly
from phonograph.graphs.recording.fact import Fact
from phonograph.graphs.recording.facts import Settlement

log = logging.getLogger("phonograph")

_REMEDY = "Call refresh() to record again"


class StaleWatch:
    """Refuses replays while a fact does not hold."""

    def __init__(self, phase: str, settled: Settlement) -> None:
        self._phase = phase
        self._check = settled.check.check
        self._fact: Fact | None = None
        self._refusal: RunEagerly | None = None
        self._warned: set[str] = set()
        settled.check.look()

    def refusal(self) -> RunEagerly | None:
        """Why a recording can't serve now; None where all that it took for granted holds."""
        fact = self._check()
        if fact is None:
            return None
        if fact is not self._fact or self._refusal is None:
            self._fact, self._refusal = fact, RunEagerly(Reason.STALE, f"{fact.change}. {_REMEDY}")
            if fact.name not in self._warned:
                self._warned.add(fact.name)
                log.warning("%s runs eagerly: %s", self._phase, self._refusal.detail)
        return self._refusal
