"""StepWidth: how many tokens of each row that decodes a step computes: a round, or one where drafts don't pay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep, Update
from phonograph.engine.requests.step_costs import StepCosts

_HOPED_FOR = 6.0
"""The time, in plain steps, that may be lost before a drafter that is always wrong is detected: about one in a hundred
for a sequence of 512 tokens. Only the first sequences lose it."""
_WEIGHT, _PROBE_WEIGHT = 1 / 16, 1 / 4
"""Of a round in the running mean: among others, and of one that was made to see whether drafts pay again."""
_MARGIN = 1.02
"""Drafts must promise this much more than they cost before rounds begin again, so that noise does not switch."""
_PROBE_ROUNDS = 2
"""The first of them has old drafts to verify, the second those of the first."""
_PROBE_SHARE = 0.005
"""Of the time of plain steps, what probes may cost at most, should all drafts be wrong."""


class StepWidth(Protocol):
    """Policy for the width of steps; consecutive steps with the same tuple of decodes should rarely differ."""

    def of(self, decodes: tuple[Sequence, ...]) -> int:
        """For a step with these decodes: `Limits.tokens_per_row`, or 1."""
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


class WherePaid:
    """Rounds while recent ones gain more in tokens than they cost in time; else plain steps, and now and then a
    probe."""

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        self._drafted = WhereDrafted(limits)
        self._costs = costs
        self._brought: float | None = None
        """Tokens a row in recent rounds, as a running mean; None before the first."""
        self._is_on = True
        self._until_probe = 0
        self._probing = 0
        """Rounds of a probe that are yet to be launched."""

    def of(self, decodes: tuple[Sequence, ...]) -> int:
        width = self._drafted.of(decodes)
        if width == 1 or not decodes:
            return width
        ratio = self._costs.ratio(len(decodes))
        if self._brought is None:
            self._brought = _hope(ratio)
        self._is_on = self._brought >= (ratio if self._is_on else ratio * _MARGIN)
        if self._is_on:
            self._until_probe = self._probing = 0
            return width
        return width if self._probes(ratio) else 1

    def _probes(self, ratio: float) -> bool:
        """Whether a step that would be plain looks whether drafts pay by now."""
        if self._probing:
            self._probing -= 1
            return True
        if not self._until_probe:
            self._until_probe = max(1, math.ceil(_PROBE_ROUNDS * (ratio - 1) / _PROBE_SHARE))
        self._until_probe -= 1
        if not self._until_probe:
            self._probing = _PROBE_ROUNDS
        return False

    def took(self, step: ScheduledStep, updates: Iterable[Update]) -> None:
        """Of rounds that a limit on the output cut off it is known that they would have brought so much at least; those
        with a stop token are left out."""
        if step.tokens_per_row == 1 or self._brought is None:
            return
        decoding, mean = set(step.decodes), self._brought
        counts = [
            len(tokens) if finish is None else max(len(tokens), mean)
            for sequence, tokens, finish in updates
            if sequence in decoding and finish in (None, FinishReason.LENGTH)
        ]
        if counts:
            weight = _WEIGHT if self._is_on else _PROBE_WEIGHT
            self._brought += weight * (sum(counts) / len(counts) - mean)

    def __str__(self) -> str:
        return f"where that pays (a round costs {self._costs} rows)"


def _hope(ratio: float) -> float:
    """The prior for tokens per round: so high that the rounds which may be lost are enough to correct it."""
    rounds = min(8.0, _HOPED_FOR / max(ratio - 1, 0.1) - 1)
    return 1 + (ratio - 1) * math.pow(1 - _WEIGHT, -max(rounds, 0.5))


def width_by(limits: Limits, costs: StepCosts | None) -> StepWidth:
    """The policy: by the measured cost of rounds, where that is known."""
    return WhereDrafted(limits) if costs is None else WherePaid(limits, costs)
