"""Buckets: the sizes that get a graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from phonograph.errors import DeclarationError
from phonograph.numbers import is_whole

# (up to this size, in steps of): fine where a row is a large share of a step, coarse where it is not.
_SEQ_STEPS = ((2, 1), (4, 2), (16, 4), (256, 8), (512, 16), (1024, 32), (4096, 128))
_TOKEN_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (65536, 512))


@dataclass(frozen=True)
class Buckets:
    """Ascending sizes; `exact` serves only those sizes, without padding."""

    sizes: tuple[int, ...]
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, list | tuple):
            raise DeclarationError(f"bucket sizes: expected a tuple, found {self.sizes!r}. Write Buckets.of(8, 16).")
        if not self.sizes:
            raise DeclarationError("bucket sizes: the list is empty. Name at least one size.")
        if not all(is_whole(size, 1) for size in self.sizes):
            raise DeclarationError(
                f"bucket sizes: expected positive whole numbers, found {list(self.sizes)}. Correct the others."
            )
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    @staticmethod
    def of(*sizes: int, exact: bool = False) -> Buckets:
        """Just these sizes."""
        return Buckets(tuple(sizes), exact)

    @staticmethod
    def up_to(limit: int) -> Buckets:
        """Sizes for sequences; the last one is `limit`, so that every batch up to it is served."""
        return Buckets(_ladder(limit, _SEQ_STEPS))

    @staticmethod
    def tokens_up_to(limit: int) -> Buckets:
        """Sizes for tokens; the last one is `limit`."""
        return Buckets(_ladder(limit, _TOKEN_STEPS))

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, used: int) -> int | None:
        """The smallest bucket that holds `used` rows, or None."""
        position = bisect_left(self.sizes, used)
        if position == len(self.sizes) or (self.exact and self.sizes[position] != used):
            return None
        return self.sizes[position]

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def _ladder(limit: int, steps: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    if not is_whole(limit, 1):
        raise DeclarationError(
            f"buckets up to {limit!r}: expected a positive whole number. Give the largest size to record."
        )
    sizes: list[int] = []
    size = 0
    for top, step in (*steps, (limit, steps[-1][1])):
        while size < min(top, limit):
            size += step
            sizes.append(min(size, limit))
    return tuple(sizes)
