"""Stale recordings: a fact that a recording took for granted has changed, so calls run eagerly until it is back."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

from phonograph.graphs.phases.decisions import Reason, RunEagerly, ShapeKey
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.phases.selection import Selection
from phonograph.graphs.recording.carried import changed_field, fields_by_name, left_out_of
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
        self._left_out = left_out_of(phase)
        self.is_on = False
        """Whether every call asks `refusal`."""

    def recorder(self, selection: Selection | None) -> FactRecorder | None:
        """What finds the facts of a capture."""
        if self._options.facts == "off" or selection is None:
            return None
        keys, alone = selection.keys, self._options.facts == "verify"
        if alone:
            # Of every product, all sizes do much the same, and a trace takes as long as many runs: one shape will do.
            keys = [key for key in keys if key.group == keys[-1].group]
        return FactRecorder(self._phase.code, keys, self._options.ignore, alone)

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

    def of_fields(
        self, key: ShapeKey, carried: Mapping[str, Any], batch: Any, kwargs: Mapping[str, Any]
    ) -> RunEagerly | None:
        """Why a recording can't serve a batch: a field that it reads, and that is no slot, has another value."""
        name = None if self._phase.compares_others else changed_field(carried, batch, kwargs, self._left_out)
        if name is None:
            return None
        found = kwargs[name] if name in kwargs else fields_by_name(batch).get(name)
        detail = (
            f"the batch's {name!r} is {reprlib.repr(found)}, and {key} was captured with another value, which it has "
            f"for good. Make it a slot or an axis, or name it in Phase(free=) if what the sample has serves every batch"
        )
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s runs eagerly: %s", self._phase.name, detail)
        return RunEagerly(Reason.STALE, detail)

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
