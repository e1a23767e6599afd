"""StepWidth: how many tokens of each row that decodes a step computes: a round, a narrower one, or one token where
drafts don't pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep, Update
from phonograph.engine.requests.step_costs import StepCosts

_STAKE, _LEAST_STAKE, _STAKE_BY_DOUBLING = 5.5, 2.5, 0.75
"""The time, in plain steps, that probes of one row may have lost at once should all drafts be wrong; that of sixteen
rows or more, of which a round tells as much as many of one row; and how much less it is for twice the rows. Together
with the share below, 1.5 to 0.9 percent of any 512 steps; what plain steps leave for the drafter may take the rest of
two. The first sequences lose it, or whoever is there when probes begin."""
_PROBE_SHARE = 0.004
"""Of the time of other steps, what further probes may lose."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 4
"""Of a probe: as many as there is credit for. One round of a single row tells little."""
_WEIGHT = 1 / 16
"""Of a round in the running means."""
_STREAK = 4.0
"""The time, in plain steps, that rounds which were to pay may lose before all that is known of them is given up."""
_REMEMBERED = 3
"""Rows of one round that all before a probe count for: what many rows show by now is worth more."""
_MARGIN = 1.02
"""Another width must promise this much more before steps change to it, so that noise does not switch."""


def stake_of(num_rows: int) -> float:
    """The time, in plain steps, that probes of so many rows may have lost."""
    return max(_LEAST_STAKE, _STAKE - _STAKE_BY_DOUBLING * (num_rows.bit_length() - 1))


Brought = tuple[int, bool]
"""Tokens that a round brought a row, and whether a limit on the output cut it off."""


class StepWidth(Protocol):
    """Policy for the width of steps; consecutive steps with the same tuple of decodes should rarely differ."""

    def of(self, decodes: tuple[Sequence, ...]) -> int:
        """For a step with these decodes: one of the widths that the engine records, or 1."""
        ...

    def took(self, step: ScheduledStep, updates: Iterable[Update]) -> None:
        """What the commit of a step brought."""
        ...


class WhereDrafted:
    """Rounds, unless no row takes drafts: then a plain step does the same for less."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.tokens_per_row
        self._decodes: tuple[Sequence, ...] | None = None
        self._width = self._most

    def of(self, decodes: tuple[Sequence, ...]) -> int:
        if self._most == 1:
            return 1
        if decodes is not self._decodes:
            depth = self._most - 1
            is_drafted = not decodes or any(sequence.draft_depth(depth) for sequence in decodes)
            self._decodes, self._width = decodes, self._most if is_drafted else 1
        return self._width

    def took(self, step: ScheduledStep, updates: Iterable[Update]) -> None:
        """Stateless: nothing to record."""

    def __str__(self) -> str:
        return "wherever a request allows drafts"


class Acceptance:
    """How many rows of a step accept a draft in each place of a round, as running means over recent rounds.

    A place is looked at only where it had a fresh draft: what is verified after a narrower step is old, unless the
    drafter has caught up in between.
    """

    def __init__(self, depth: int) -> None:
        self._shares, self._seen = [0.0] * depth, [0] * depth
        self._before = depth + 1

    def note(self, width: int, counts: Mapping[Brought, int], *, catches_up: bool = False) -> None:
        """A step of this width, and how many rows it brought what; what is not known of a place counts as the mean."""
        drafted, self._before = (width if catches_up else min(width, self._before)) - 1, width
        num_rows = sum(counts.values())
        for place in range(drafted if num_rows else 0):
            mean = self._shares[place]
            share = (
                sum(
                    rows * (1.0 if count > place + 1 else mean if is_cut_off else 0.0)
                    for (count, is_cut_off), rows in counts.items()
                )
                / num_rows
            )
            self._seen[place] += num_rows
            self._shares[place] += max(_WEIGHT, num_rows / self._seen[place]) * (share - self._shares[place])

    def forget(self) -> None:
        """What is known so far counts for a few rounds only."""
        self._seen = [min(seen, _REMEMBERED) for seen in self._seen]

    def give_up(self) -> None:
        """As if nothing had ever been accepted."""
        self._shares, self._seen = [0.0] * len(self._shares), [0] * len(self._seen)

    def tokens(self, width: int) -> float:
        """What a round of this width brings a row: its token, and what is accepted; no place more than one before."""
        return 1 + sum(accumulate(self._shares[: width - 1], min))


class WherePaid:
    """Of all widths the one by which recent rounds gain most in tokens for their time, or plain steps; and now and then
    a probe by a wider one.

    A probe is paid for when it is launched, as if it brought nothing: what is in flight counts.
    """

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        self._drafted = WhereDrafted(limits)
        self._costs = costs
        self._acceptance = Acceptance(limits.tokens_per_row - 1)
        self._width = 1
        """That of steps which are no probes."""
        self._credit = _STAKE
        """The time, in plain steps, that probes may lose."""
        self._probe, self._rounds_left = 0, 0
        """The width of the last probe, and its rounds that are yet to be launched."""
        self._last = limits.tokens_per_row
        """The width of the last step."""
        self._lost = 0.0
        """The time, in plain steps, that recent rounds lost which were to pay; no less than none."""

    def of(self, decodes: tuple[Sequence, ...]) -> int:
        width = self._drafted.of(decodes)
        if width > 1 and decodes:
            ratios = {one: self._costs.ratio(len(decodes), one) for one in (*self._costs.widths, 1)}
            width = self._width = self._best(ratios)
            if self._probes(ratios, self._costs.to_catch_up(len(decodes)), stake_of(len(decodes))):
                width = self._probe
        elif decodes:
            self._rounds_left = 0  # what is left of a probe would begin with old drafts
        self._last = width if decodes else self._last
        return width

    def _best(self, ratios: dict[int, float]) -> int:
        """The width that brings most for its time; the one that is in use wins by a margin."""

        def rate(width: int) -> float:
            return self._acceptance.tokens(width) / ratios[width]

        best = max(ratios, key=rate)
        return best if rate(best) > rate(self._width) * _MARGIN else self._width

    def _probes(self, ratios: dict[int, float], catching_up: float, stake: float) -> bool:
        """Whether a step looks what a wider round brings by now; it is paid for then."""
        own = ratios[self._width]
        self._credit = min(_STAKE, self._credit + _PROBE_SHARE * own)
        if not self._rounds_left:
            self._begin_probe(ratios, own, catching_up, stake)
        if not self._rounds_left or self._probe <= self._width:
            self._rounds_left = 0
            return False
        self._rounds_left -= 1
        self._credit -= max(0.0, ratios[self._probe] - own)
        return True

    def _begin_probe(self, ratios: dict[int, float], own: float, catching_up: float, stake: float) -> None:
        """By the widest round that can pay at all and that is not too dear, once there is the credit for it."""
        for width in self._costs.widths:
            each = max(1e-6, ratios[width] - own)
            # After plain steps the drafter catches up first; after a narrower round, one more has old drafts to verify.
            is_narrower = 1 < self._last < width
            first = catching_up if self._last == 1 else each if is_narrower else 0.0
            fewest = _FEWEST_ROUNDS if first + _FEWEST_ROUNDS * each <= stake else 1
            price = first + fewest * each
            if width > self._width and ratios[width] < width and price <= _STAKE:
                if price <= self._credit:
                    self._acceptance.forget()
                    self._credit = min(self._credit, max(stake, price))
                    rounds = min(_MOST_ROUNDS, max(fewest, int((self._credit - first) / each)))
                    self._credit -= catching_up if self._last == 1 else 0.0
                    self._probe, self._rounds_left = width, rounds + is_narrower
                return

    def took(self, step: ScheduledStep, updates: Iterable[Update]) -> None:
        """Of rounds that a limit on the output cut off it is known that they would have brought so much at least; those
        with a stop token are left out."""
        if not step.decodes:
            return
        width = step.tokens_per_row
        counts = Counter[Brought](_brought(step, updates)) if width > 1 else Counter[Brought]()
        self._acceptance.note(width, counts, catches_up=step.catches_up)
        if counts and width <= self._width:
            mean = self._acceptance.tokens(width)
            brought = sum(rows * (max(one, mean) if is_cut_off else one) for (one, is_cut_off), rows in counts.items())
            gained = brought / counts.total() - self._costs.ratio(len(step.decodes), width)
            self._lost = max(0.0, self._lost - gained)
            if self._lost > _STREAK:
                self._acceptance.give_up()
                self._width, self._lost = 1, 0.0

    def __str__(self) -> str:
        return f"where that pays (a round costs, by rows: {self._costs})"


def _brought(step: ScheduledStep, updates: Iterable[Update]) -> Iterator[Brought]:
    """What each row that decoded got, and went on, or was cut off by a limit."""
    decoding = set(step.decodes) if step.prefills else None
    for sequence, tokens, finish in updates:
        if (finish is None or finish is FinishReason.LENGTH) and (decoding is None or sequence in decoding):
            yield len(tokens), finish is not None


def width_by(limits: Limits, costs: StepCosts | None) -> StepWidth:
    """The policy: by the measured cost of rounds, where that is known."""
    return WhereDrafted(limits) if costs is None else WherePaid(limits, costs)
