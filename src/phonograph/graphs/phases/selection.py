"""Selection: the recordings that a phase gets, products of its axes × sizes, under the plan's bound.

The plain product gets every bucket, whatever the bound: it has as many recordings as the plan has buckets.
The others share what is left. Where it is not enough, each has fewer sizes, from the largest to the smallest, and
batches between two of them are padded further; where there are more products than recordings, the last get none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from phonograph.graphs.phases.axes import PLAIN, Values, described, recorded_products
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.phase import Phase


@dataclass(frozen=True)
class LeftOut:
    """The sizes of a product that the bound has no room for."""

    product: Values
    sizes: tuple[int, ...]
    num_recordings: int
    is_whole: bool
    """Whether it has no recording at all."""
    bound: int
    exact: bool = False

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        what = (
            "all sizes"
            if self.is_whole
            else f"sizes {sizes}{'' if self.exact else ', which the next larger one serves'}"
        )
        return f"{described(self.product)}: {what} (max_recordings is {self.bound})"


@dataclass(frozen=True)
class Selection:
    """The recordings to make, and what was left out."""

    phase: Phase
    sizes: Mapping[Values, Buckets]
    """By product, the buckets that get a recording; a product without any is not in it."""
    left_out: tuple[LeftOut, ...] = ()

    @cached_property
    def keys(self) -> list[ShapeKey]:
        """Every recording to make, largest first."""
        phase, absences = self.phase, absences_of(self.phase)
        return [
            ShapeKey(phase.name, phase.bucketed, size, product, absent)
            for size in sorted({size for buckets in self.sizes.values() for size in buckets}, reverse=True)
            for product, buckets in self.sizes.items()
            if size in buckets.sizes
            for absent in absences
        ]


def select(phase: Phase, buckets: Buckets, bound: int) -> Selection:
    """The recordings of a phase, at most so many where it has products beyond the plain one."""
    products = recorded_products(phase.axes, phase.products)
    others = [product for product in products if product != PLAIN]
    num_absences = len(absences_of(phase))
    num_plain = (len(products) - len(others)) * len(buckets) * num_absences
    room = max(0, bound - num_plain) // num_absences
    sizes: dict[Values, Buckets] = {PLAIN: buckets} if len(others) < len(products) else {}
    left_out: list[LeftOut] = []
    for index, product in enumerate(others):
        # Where the division has a remainder, the first products get one more.
        count = (room - index - 1) // len(others) + 1
        kept = _spread(buckets.sizes, min(count, len(buckets)))
        if kept:
            sizes[product] = Buckets(kept, buckets.exact)
        if len(kept) < len(buckets):
            missing = tuple(size for size in buckets if size not in kept)
            left_out.append(LeftOut(product, missing, len(missing) * num_absences, not kept, bound, buckets.exact))
    return Selection(phase, sizes, tuple(left_out))


def absences_of(phase: Phase) -> list[frozenset[str]]:
    """Every combination of absent keyed slots."""
    names = [slot.name for slot in phase.keyed]
    return [frozenset(found) for count in range(len(names) + 1) for found in combinations(names, count)]


def _spread(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of the sizes, evenly, both ends among them; one alone is the largest, which serves all."""
    if count < 2:
        return tuple(sizes[-1:]) if count == 1 else ()
    last = len(sizes) - 1
    return tuple(sizes[round(index * last / (count - 1))] for index in range(count))
