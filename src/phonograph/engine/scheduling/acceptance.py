"""Acceptance: how many drafts of a row are right, by place, as running means over what rounds and probes show."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

_WEIGHT = 1 / 16
"""Of a round in the running means, at least."""
_DOUBT = 1.0
"""Rows without a right draft that count as seen at first, so that a lucky one does not decide."""
_REMEMBERED = 3.0
"""Rows of one round that all before a probe count for: what many rows show by now is worth more."""

Brought = tuple[int, bool]
"""Tokens that a round brings a row, and whether a limit on the output cuts it off."""


class Acceptance:
    """How many rows of a step accept a draft in each place of a round, as running means over recent rounds.

    A place is looked at only where it had a fresh draft: what is verified after a narrower step is old, unless the
    drafter has caught up in between.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self._before = depth, depth + 1
        self._shares, self._seen = [0.0] * depth, [_DOUBT] * depth
        self._sum_up()

    def note(self, width: int, counts: Mapping[Brought, int], *, catches_up: bool = False) -> None:
        """A step of this width, and how many rows it brought what; what is not known of a place counts as the mean."""
        drafted, self._before = (width if catches_up else min(width, self._before)) - 1, width
        self._learn(drafted, counts)

    def note_probe(self, counts: Mapping[Brought, int]) -> None:
        """What a round of fresh drafts would have brought; what was known before counts for little then."""
        self.forget()
        self._learn(len(self._shares), counts)

    def _learn(self, places: int, counts: Mapping[Brought, int]) -> None:
        num_rows = sum(counts.values())
        if not num_rows:
            return
        for place in range(places):
            mean = self._shares[place]
            share = (
                sum(
                    rows * (1.0 if count > place + 1 else mean if is_cut_off else 0.0)
                    for (count, is_cut_off), rows in counts.items()
                )
                / num_rows
            )
            seen = self._seen[place] = min(self._seen[place] + num_rows, num_rows / _WEIGHT)
            self._shares[place] += num_rows / seen * (share - mean)
        self._sum_up()

    def forget(self) -> None:
        """What is known so far counts for a few rows only."""
        self._seen = [min(seen, _REMEMBERED) for seen in self._seen]

    def give_up(self) -> None:
        """As if nothing had ever been accepted."""
        self._shares, self._seen = [0.0] * len(self._shares), [_DOUBT] * len(self._shares)
        self._sum_up()

    def _sum_up(self) -> None:
        self._tokens = [*accumulate(accumulate(self._shares, min), initial=1.0)]

    def tokens(self, width: int) -> float:
        """What a round of this width brings a row: its token, and what is accepted; no place more than one before."""
        return self._tokens[width - 1]
