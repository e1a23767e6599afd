"""BlockPool: the pages of the KV cache, with a reference count for each."""

from __future__ import annotations

from collections.abc import Iterable

from phonograph.errors import PhonographError


class BlockPool:
    """Allocates pages and counts references; page 0, the null page that padding writes to, is never allocated."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_returns = 0
        """Counts releases of references."""
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - len(self._free)

    @property
    def num_held_once(self) -> int:
        """Pages with one reference; scans every page, for metrics only."""
        return self._references.count(1)

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, count: int) -> list[int] | None:
        """`count` free pages with a reference each for the caller; None, without taking any, if there are fewer."""
        if count > len(self._free):
            return None
        if count <= 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; each must have one already."""
        for page in pages:
            if not self._references[page]:
                raise PhonographError(f"sharing page {page}: it has no reference. Allocate it from the pool instead.")
            self._references[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop a reference of each page; a page without references is free again."""
        self.num_returns += 1
        for page in pages:
            if not self._references[page]:
                raise PhonographError(
                    f"releasing page {page}: it has no reference, so it is released twice. Release it once."
                )
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def check(self) -> None:
        """Raise if a page is lost, or free and held at once; changes nothing."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise PhonographError("block pool: a page is in the free list twice.")
        if 0 in free or self._references[0]:
            raise PhonographError("block pool: the null page 0 was handed out.")
        both = sorted(page for page in free if self._references[page])
        lost = [page for page in range(1, self.num_pages) if page not in free and not self._references[page]]
        if both or lost:
            raise PhonographError(
                f"block pool: free + held must be {self.num_pages - 1} pages; "
                f"free and held at once: {both}; neither: {lost}."
            )
