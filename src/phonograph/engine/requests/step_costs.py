"""StepCosts: how much longer a round of drafts takes than a plain step, by rows and by width, as it was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phonograph.sizes import is_power_of_two


@dataclass(frozen=True)
class StepCosts:
    """Ratios of times, by numbers of rows."""

    sizes: tuple[int, ...]
    """Rising."""
    ratios: Mapping[int, tuple[float, ...]]
    """Tokens that a round computes of each row → the ratio at each size."""
    catching_up: tuple[float, ...] = ()
    """What a drafter does before the first round after plain steps, and before a probe, in plain steps, at each size;
    nothing where it is empty, and infinite where it is not recorded."""
    plain_seconds: tuple[float, ...] = ()
    """Of a plain step, at each size."""
    among_prompts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Tokens of each row in a round → how many plain steps longer a step with prompts takes for it, at each size; as
    much longer as a step without any where nothing was measured."""
    among_rows: tuple[int, ...] = ()
    """How many rows decoded where that was timed, rising; at other sizes it follows from these."""
    untimed: str = ""
    """Why nothing was timed among prompts."""

    @property
    def widths(self) -> list[int]:
        """Of rounds, the widest first."""
        return sorted(self.ratios, reverse=True)

    def ratio(self, num_rows: int, width: int) -> float:
        """For so many rows: that of the next size which was measured; a plain step is 1."""
        return 1.0 if width == 1 else self.ratios[width][self._at(num_rows)]

    def ratio_among_prompts(self, num_rows: int, width: int) -> float:
        """What `ratio` is, of what a step with prompts takes for the rows that decode in it."""
        if width == 1 or width not in self.among_prompts:
            return self.ratio(num_rows, width)
        return 1.0 + self.among_prompts[width][self._at(num_rows)]

    def to_catch_up(self, num_rows: int) -> float:
        """For so many rows, what the first round after plain steps, or a probe, costs besides."""
        return self.catching_up[self._at(num_rows)] if self.catching_up else 0.0

    def _at(self, num_rows: int) -> int:
        return min(bisect_left(self.sizes, num_rows), len(self.sizes) - 1)

    def told(self) -> list[int]:
        """Which sizes are told of many: the powers of two, and the largest."""
        return [at for at, size in enumerate(self.sizes) if is_power_of_two(size) or size == self.sizes[-1]]

    def __str__(self) -> str:
        parts = [self._each(width, self.ratios[width], self.told(), "{:.2f}×") for width in self.widths]
        timed = sorted({self._at(num_rows) for num_rows in self.among_rows})
        longer = [
            self._each(width, found, timed, "+{:.2f}")
            for width, found in sorted(self.among_prompts.items(), reverse=True)
        ]
        why = f": {self.untimed}" if self.untimed else ""
        among = f"among prompts, in plain steps: {'; '.join(longer)}" if longer else f"not timed among prompts{why}"
        return "; ".join([*parts, among])

    def _each(self, width: int, found: Sequence[float], told: Sequence[int], form: str) -> str:
        each = ", ".join(f"{form.format(found[at])} at {self.sizes[at]}" for at in told)
        return f"{width} tokens {each}"
