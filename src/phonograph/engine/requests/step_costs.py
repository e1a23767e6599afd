"""StepCosts: how much longer a round of drafts takes than a plain step, by rows and by width, as it was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

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

    @property
    def widths(self) -> list[int]:
        """Of rounds, the widest first."""
        return sorted(self.ratios, reverse=True)

    def ratio(self, num_rows: int, width: int) -> float:
        """For so many rows: that of the next size which was measured; a plain step is 1."""
        return 1.0 if width == 1 else self.ratios[width][self._at(num_rows)]

    def to_catch_up(self, num_rows: int) -> float:
        """For so many rows, what the first round after plain steps, or a probe, costs besides."""
        return self.catching_up[self._at(num_rows)] if self.catching_up else 0.0

    def _at(self, num_rows: int) -> int:
        return min(bisect_left(self.sizes, num_rows), len(self.sizes) - 1)

    def told(self) -> list[int]:
        """Which sizes are told of many: the powers of two, and the largest."""
        return [at for at, size in enumerate(self.sizes) if is_power_of_two(size) or size == self.sizes[-1]]

    def __str__(self) -> str:
        told = self.told()
        return "; ".join(
            f"{width} tokens " + ", ".join(f"{self.ratios[width][at]:.2f}× at {self.sizes[at]}" for at in told)
            for width in self.widths
        )
