"""Prefix cache: pages that outlive their sequence, found again by the tokens that they hold."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from phonograph.engine.cache.block_pool import BlockPool

_Edge = bytes
"""The key of a page: the page before it, or 0 at the root, and its own tokens."""

STATE_BY_ROW = "state-by-row-shares-no-prefixes"
"""The rule for models that keep state of a sequence as a whole."""


@dataclass(frozen=True)
class PrefixSharing:
    """Whether sequences share the pages of equal prompts, and why."""

    is_on: bool
    reason: str

    def __str__(self) -> str:
        return f"prefix cache: {'on' if self.is_on else 'off'}: {self.reason}"


def prefix_sharing(requested: bool, state_by_row: Sequence[str]) -> PrefixSharing:
    """As requested, unless the model or a pass has state that no page holds: a prefix in pages would lack it."""
    if not requested:
        return PrefixSharing(False, "as requested")
    if state_by_row:
        names = ", ".join(state_by_row)
        return PrefixSharing(False, f"there is state by row ({names}), which pages don't hold ({STATE_BY_ROW})")
    return PrefixSharing(True, "pages hold all that the model keeps of a prompt")


class PrefixCache:
    """A radix tree over full pages of token ids; it holds one reference of its own for each page in it.

    Only full pages enter, and a sequence writes only after what it has computed: so a shared page is never written,
    and two sequences never write one page.

    A page is its own node: an edge names its parent page, so the tree is a flat table of numbers and bytes, which the
    garbage collector need not walk.
    """

    def __init__(self, pool: BlockPool, page_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool
        self._page_size = page_size
        self._pages: dict[_Edge, int] = {}
        self._edges: dict[int, _Edge] = {}
        self._num_children = [0] * pool.num_pages
        self._last_used = [0] * pool.num_pages
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []
        """A heap of (last used, page); an entry may be out of date, and then it is corrected when it surfaces."""
        self._is_queued = bytearray(pool.num_pages)
        self._drained_at = -1
        """The pool's count of releases when all leaves were found in use; until it changes, they still are."""

    @property
    def num_pages(self) -> int:
        return len(self._edges)

    def pages(self) -> list[int]:
        """Every page in the tree."""
        return list(self._edges)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, with a reference on each for the caller.

        Never all of `tokens`: at least one is left to compute, since its logits give the next token.
        """
        if not self.enabled:
            return []
        self._clock += 1
        found: list[int] = []
        page = 0
        for full in self._full_pages(tokens, len(tokens) - 1):
            child = self._pages.get(_edge(page, full))
            if child is None:
                break
            found.append(child)
            self._last_used[child] = self._clock
            page = child
        self._pool.share(found)
        return found

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the full pages of `tokens`, which must be computed and never be written again.

        The cache takes its own reference on each page that it keeps. Where it has a page with these tokens already, it
        keeps that one; the caller's page stays the caller's, and is free once the caller releases it.
        """
        if not self.enabled:
            return
        self._clock += 1
        kept: list[int] = []
        page = 0
        for full, own in zip(self._full_pages(tokens, len(tokens)), pages, strict=False):
            edge = _edge(page, full)
            child = self._pages.get(edge)
            if child is None:
                child = self._pages[edge] = own
                self._edges[own] = edge
                self._num_children[page] += 1
                kept.append(own)
            self._last_used[child] = self._clock
            page = child
        self._pool.share(kept)
        self._queue(page)

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first, and say how many; what a sequence holds stays."""
        if self._drained_at == self._pool.num_returns:
            return 0
        freed = 0
        in_use: list[int] = []
        while freed < count and self._leaves:
            stamp, page = heappop(self._leaves)
            self._is_queued[page] = False
            if self._last_used[page] != stamp:
                self._queue(page)
            elif self._pool.references(page) > 1:
                in_use.append(page)
            elif not self._num_children[page]:
                self._remove(page)
                freed += 1
        if freed < count:
            self._drained_at = self._pool.num_returns
        # They count as used now, which also moves them to the end of the next call's order.
        for page in in_use:
            self._last_used[page] = self._clock
            self._queue(page)
        return freed

    def clear(self) -> None:
        """Drop every prefix, as after a change of the weights; pages that sequences hold stay theirs."""
        self._pool.give_back(self._edges)
        self._pages.clear()
        self._edges.clear()
        self._leaves.clear()
        self._num_children = [0] * self._pool.num_pages
        self._is_queued = bytearray(self._pool.num_pages)

    def _full_pages(self, tokens: Sequence[int], stop: int) -> Iterator[bytes]:
        """The tokens of each page that ends at or before `stop`."""
        packed = array("q", tokens).tobytes()
        size = self._page_size
        for start in range(0, stop - size + 1, size):
            yield packed[8 * start : 8 * (start + size)]

    def _queue(self, page: int) -> None:
        if page and not self._is_queued[page] and not self._num_children[page]:
            self._is_queued[page] = True
            heappush(self._leaves, (self._last_used[page], page))

    def _remove(self, page: int) -> None:
        edge = self._edges.pop(page)
        del self._pages[edge]
        self._pool.give_back((page,))
        parent = int.from_bytes(edge[:4], "little")
        self._num_children[parent] -= 1
        self._queue(parent)


def _edge(page: int, tokens: bytes) -> _Edge:
    return page.to_bytes(4, "little") + tokens
