"""Stale recordings: a fact that a recording took for granted has changed, so calls run eagerly until it is back."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from phonograph.graphs.inputs.fields import Path, fetch
from phonograph.graphs.phases.decisions import Reason, RunEagerly, ShapeKey
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.phases.selection import Selection
from phonograph.graphs.recording.carried import Carried, changed_field, fields_by_name, left_out_of
from phonograph.graphs.recording.fact import Fact
from phonograph.graphs.recording.facts import FactRecorder, Settlement, WatchedFacts
from phonograph.graphs.recording.late_reads import WrittenMemory
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
        self._late: list[tuple[Path, Mapping[int, WrittenMemory]]] = []
        """Inputs that are read after memory was written, and that memory."""
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
        late = settled.late_reads.by_input if settled is not None and self.is_on else {}
        self._late = [(slot.path, late[slot.name]) for slot in self._phase.slots if slot.name in late]
        if settled is not None and self.is_on:
            settled.check.look()

    @property
    def facts(self) -> WatchedFacts:
        return self._settled.facts if self._settled is not None else WatchedFacts()

    def find(self) -> Fact | None:
        """A fact that does not hold, by a look at all of them."""
        return self._settled.check.find() if self._settled is not None else None

    def of_batch(self, key: ShapeKey, carried: Carried, batch: Any, kwargs: Mapping[str, Any]) -> RunEagerly | None:
        """Why a recording can't serve a batch: by a field that is no slot, or by whose memory an input is."""
        return (self._of_fields(key, carried, batch, kwargs) if carried else None) or (
            self._of_memory(batch, kwargs) if self._late else None
        )

    def _of_memory(self, batch: Any, kwargs: Mapping[str, Any]) -> RunEagerly | None:
        """An input is memory that the body writes, and then reads as its input."""
        for path, memory in self._late:
            value = fetch(batch, kwargs, path)
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                found = memory.get(value.untyped_storage()._cdata)
                if found is not None and found.is_there:
                    name, state = ".".join(map(str, path)), found.name or "its own state"
                    detail = (
                        f"{name!r} was given the memory of {state}, which the body writes before it reads {name!r}: a "
                        "replay would read what was there when the call began. Pass a copy (`.clone()`), or read the "
                        "input before the write"
                    )
                    self._warn_once(f"memory of {name}", detail)
                    return RunEagerly(Reason.STALE, detail)
        return None

    def _warn_once(self, name: str, detail: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s runs eagerly: %s", self._phase.name, detail)

    def _of_fields(self, key: ShapeKey, carried: Carried, batch: Any, kwargs: Mapping[str, Any]) -> RunEagerly | None:
        """A field that the recording reads, and that is no slot, has another value."""
        name = None if self._phase.compares_others else changed_field(carried, batch, kwargs, self._left_out)
        if name is None:
            return None
        found = kwargs[name] if name in kwargs else fields_by_name(batch).get(name)
        line = f" ({carried.lines[name]})" if name in carried.lines else ""
        detail = (
            f"the batch's {name!r} is {reprlib.repr(found)}, and {key} was captured with another value, which it has "
            f"for good{line}. Make it a slot or an axis, or name it in Phase(free=) if what the sample has serves "
            "every batch"
        )
        self._warn_once(name, detail)
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
            self._warn_once(fact.name, self._refusal.detail)
        return self._refusal
