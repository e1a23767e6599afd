"""DecodeSet: the sequences that decode, and for how many steps the same set can be launched unchanged."""

from __future__ import annotations

from collections.abc import Iterator

from phonograph.engine.cache.rows import Rows
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.sequence import Sequence, State


class DecodeSet:
    """Every running sequence whose prefill is launched, with pages ahead of need.

    An update of the set is `provide` (pages), then `settle` (which are ready); between two updates `take` returns the
    same tuple again and again, which makes a steady step cheap.
    """

    def __init__(self, limits: Limits, rows: Rows) -> None:
        self.is_short = False
        """A sequence has no pages for the next step."""
        self._rows = rows
        self._max_len = limits.max_len
        self._per_step = limits.tokens_per_row
        self._is_exact = limits.fewest_per_row == limits.tokens_per_row
        """Whether the counts of launched steps are those of committed ones."""
        self._low = max(limits.reserve_tokens // 2, self._per_step - 1)
        self._members: list[Sequence] = []
        self._ready: tuple[Sequence, ...] = ()
        self._steps_left = 0
        self._has_waits = False
        """Some must not run ahead of their own tokens."""

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    @property
    def is_settled(self) -> bool:
        return self._steps_left > 0

    def join(self, sequence: Sequence) -> None:
        self._members.append(sequence)
        self._has_waits |= not sequence.request.run_ahead
        self._steps_left = 0

    def drop_idle(self) -> None:
        """Drop sequences that no longer run."""
        self._members = [sequence for sequence in self._members if sequence.state is State.RUNNING]
        self._steps_left = 0

    def unsettle(self) -> None:
        """A sequence has ended: update the set before the next step."""
        self._steps_left = 0

    def settle_for(self, steps: int) -> None:
        """For no more than so many steps: then all tokens of one are launched, as a commit shows."""
        self._steps_left = min(self._steps_left, steps)

    def take(self) -> tuple[Sequence, ...]:
        """Those that are ready for the next step."""
        self._steps_left -= 1
        return self._ready

    def provide(self, committed: int) -> list[Sequence]:
        """Drop finished sequences, give pages to those that run low; returns those left without, by rank."""
        running, low, per_step, exact = State.RUNNING, self._low, self._per_step, self._is_exact
        members: list[Sequence] = []
        needy: list[Sequence] = []
        fewest = self._max_len
        for sequence in self._members:
            if sequence.state is not running:
                continue
            left = sequence.max_outputs - sequence.num_launched_outputs
            if left <= 0:
                self._rows.leave(sequence, committed)
                continue
            members.append(sequence)
            computed = sequence.num_computed
            headroom = sequence.capacity - computed
            missing = left if exact else sequence.max_computed - computed
            if headroom < missing:
                # Sequences that run low get pages together with the first that must: so most steps change no table.
                if headroom <= low and not self._rows.extend(sequence):
                    needy.append(sequence)
                headroom = sequence.capacity - computed
            # Steps of one token each end it after `left`; how many wider ones do is known when they are committed.
            steps = headroom if exact else left if headroom >= missing else headroom // per_step
            fewest = min(fewest, left, steps)
        self._members, self._steps_left = members, fewest
        self.is_short = bool(needy)
        return sorted(needy, key=_rank)

    def settle(self, committed: int) -> None:
        """Decide which are ready, and for how many steps that holds."""
        if self.is_short or self._has_waits:
            self._settle_each(committed)
        elif (ready := tuple(self._members)) != self._ready:
            self._ready = ready

    def _settle_each(self, committed: int) -> None:
        """Some may be preempted by now, some have no pages, and some wait for the token of their last step."""
        self._members = [sequence for sequence in self._members if sequence.state is State.RUNNING]
        placed = [sequence for sequence in self._members if sequence.has_room(self._per_step)]
        self._ready = tuple(seq for seq in placed if seq.request.run_ahead or seq.last_step <= committed)
        self.is_short = len(placed) < len(self._members)
        self._has_waits = not all(sequence.request.run_ahead for sequence in self._members)
        self._steps_left = 1


def _rank(sequence: Sequence) -> tuple[int, int, float, int]:
    return sequence.rank
