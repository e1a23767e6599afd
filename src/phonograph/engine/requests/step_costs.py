"""StepCosts: how much longer a round of drafts takes than a plain step, by rows, as it was measured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from phonograph.sizes import is_power_of_two


@dataclass(frozen=True)
class StepCosts:
    """Ratios of times, by numbers of rows."""

    sizes: tuple[int, ...]
    """Rising."""
    ratios: tuple[float, ...]

    def ratio(self, num_rows: int) -> float:
        """For so many rows: that of the next size which was measured."""
        return self.ratios[min(bisect_left(self.sizes, num_rows), len(self.sizes) - 1)]

    def __str__(self) -> str:
        """Of many sizes the powers of two, and the largest."""
        told = [
            f"{ratio:.2f}× at {size}"
            for size, ratio in zip(self.sizes, self.ratios, strict=True)
            if is_power_of_two(size) or size == self.sizes[-1]
        ]
        return ", ".join(told)
