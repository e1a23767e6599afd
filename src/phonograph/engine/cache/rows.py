"""Rows: rows of the device tables with the pages that they list; a row is reused once no launched step reads it."""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from phonograph.engine.cache.reservations import Reservations
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import PageUpdate
from phonograph.errors import PhonographError


class Rows:
    """Assigns sequences to rows 1..max_seqs, and frees rows late.

    A sequence that leaves keeps row and pages until the last step launched with it is committed: a step in flight reads
    and writes them, whatever the host has decided since.
    """

    def __init__(self, limits: Limits, *, prefix_cache: bool) -> None:
        self.reservations = Reservations(limits, prefix_cache=prefix_cache)
        self.num_changes = 0
        """Changes whenever pages become free or shareable; until then, what did not fit still does not."""
        self._max_seqs = limits.max_seqs
        self._free = list(range(limits.max_seqs, 0, -1))
        self._seated: dict[int, Sequence] = {}
        self._leaving: dict[Sequence, None] = {}
        self._untabled: dict[Sequence, None] = {}
        """Sequences with pages that the device tables don't know yet."""

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def is_empty(self) -> bool:
        return not self._seated

    @property
    def leaving(self) -> KeysView[Sequence]:
        """Finished sequences that keep row and pages until their last step is committed."""
        return self._leaving.keys()

    def seat(self, sequence: Sequence) -> bool:
        """Give a free row, and pages for all known tokens; False, and nothing given, if the pages are short."""
        if not self.reservations.admit(sequence):
            return False
        sequence.row = self._free.pop()
        self._seated[sequence.row] = sequence
        self._untabled[sequence] = None
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Give pages for the next step and the reserve; False if the next step has no room."""
        fits = self.reservations.extend(sequence)
        if sequence.num_tabled < len(sequence.pages):
            self._untabled[sequence] = None
        return fits

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others share the full pages of the first `num_tokens`, which committed steps have written."""
        self.reservations.keep(sequence, num_tokens)
        self.num_changes += 1

    def leave(self, sequence: Sequence, committed: int) -> bool:
        """Free row and pages if no step after `committed` uses them, else later; whether that happened now."""
        if sequence.last_step > committed:
            self._leaving[sequence] = None
            return False
        self._release(sequence)
        return True

    def retire(self, committed: int) -> list[Sequence]:
        """Free rows and pages of sequences whose last step is committed."""
        gone = [sequence for sequence in self._leaving if sequence.last_step <= committed]
        for sequence in gone:
            self._release(sequence)
        return gone

    def forget(self, sequence: Sequence) -> None:
        """Free row and pages without caching them; none of its steps may be in flight."""
        self._release(sequence, keep=False)

    def page_updates(self) -> tuple[PageUpdate, ...]:
        """Page table updates for the device; each page is sent once, unless the step raises."""
        if not self._untabled:
            return ()
        updates: list[PageUpdate] = []
        for sequence in self._untabled:
            row, first = sequence.row, sequence.num_tabled
            updates += [(row, index, page) for index, page in enumerate(sequence.pages[first:], first)]
            sequence.num_tabled = len(sequence.pages)
        self._untabled.clear()
        return tuple(updates)

    def tell_again(self, updates: Iterable[PageUpdate]) -> None:
        """After a step that raised it is unknown what the device tables got: its pages are sent again."""
        for row, index, _ in updates:
            sequence = self._seated.get(row)
            if sequence is not None and index < sequence.num_tabled:
                sequence.num_tabled = index
                self._untabled[sequence] = None

    def check(self) -> None:
        """Raise if a row or a reference to a page is lost; changes nothing."""
        rows = sorted([*self._free, *self._seated])
        if rows != list(range(1, self._max_seqs + 1)):
            raise PhonographError(
                f"integrity of the rows: free and taken ones must be 1 to {self._max_seqs}, each once; found {rows}."
            )
        stuck = [seq for seq in self._seated.values() if seq.finish is not None and seq not in self._leaving]
        if stuck:
            raise PhonographError(
                f"integrity of the rows: finished sequences whose rows no step in flight will release: {stuck}."
            )
        self.reservations.check(self._seated.values())

    def _release(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._leaving.pop(sequence, None)
        self._untabled.pop(sequence, None)
        self.reservations.release(sequence, keep=keep)
        del self._seated[sequence.row]
        self._free.append(sequence.row)
        sequence.row = 0
        self.num_changes += 1
