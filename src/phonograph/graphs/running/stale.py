"""Stale recordings: a fact that a recording took for granted has changed, so calls run eagerly until it is back."""

from __future__ import annotations

import logging

from phonograph.graphs.phases.decisions import Reason, RunEagerly
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.phases.selection import Selection
from phonograph.graphs.recording.fact import Fact
from phonograph.graphs.recording.facts import FactRecorder, Settlement, WatchedFacts
from phonograph.graphs.running.runner_options import RunnerOptions

log = logging.getLogger("phonograph")
_MAX_OTHERS = 4


class StaleWatch:
    """Has the facts of a runner's recordings, and refuses replays while one of them does not hold."""

    def __init__(self, phase: Phase, options: RunnerOptions) -> None:
        self._phase = phase
        self._options = options
        self._settled: Settlement | None = None
        self._fact: Fact | None = None
        self._refusal: RunEagerly | None = None
        self._warned: set[str] = set()
        self.is_on = False
        """Whether every call asks `refusal`."""

    def recorder(self, selection: Selection | None) -> FactRecorder | None:
        """What finds the facts of a capture."""
        if self._options.facts == "off" or selection is None:
            return None
        return FactRecorder(self._phase.code, selection.keys, self._options.ignore)

    def begin(self, settled: Settlement | None) -> None:
        """Watch what a capture found, or nothing any more."""
        self._settled, self._fact = settled, None
        self.is_on = settled is not None and self._options.facts == "check"
        if settled is not None and self.is_on:
            settled.check.look()

    @property
    def facts(self) -> WatchedFacts:
        return self._settled.facts if self._settled is not None else WatchedFacts()

    def find(self) -> Fact | None:
        """A fact that does not hold, by a look at all of them."""
        return self._settled.check.find() if self._settled is not None else None

    def refusal(self) -> RunEagerly | None:
        """Why a recording can't serve now; None where all that it took for granted holds."""
        assert self._settled is not None
        fact = self._settled.check.check()
        if fact is None:
            return None
        change = fact.change
        if fact is not self._fact or self._refusal is None or not self._refusal.detail.startswith(change):
            self._fact = fact
            others = self._settled.check.others
            named = ", ".join(others[:_MAX_OTHERS]) + (", …" if len(others) > _MAX_OTHERS else "")
            change += f"; also changed: {named}" if others else ""
            self._refusal = RunEagerly(Reason.STALE, f"{change}. Put it back, or call refresh() to record again")
            if fact.name not in self._warned:
                self._warned.add(fact.name)
                log.warning("%s runs eagerly: %s", self._phase.name, self._refusal.detail)
        return self._refusal
