"""Pages that outlive their sequence, found again by the tokens that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from phonograph.engine.kvcache.block_pool import BlockPool

_Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Node:
    """One full page; the way to it from the root spells the tokens before it."""

    page: int
    tokens: _Tokens
    parent: _Node | None
    last_used: int = 0
    is_queued: bool = False
    children: dict[_Tokens, _Node] = field(default_factory=dict)


class PrefixCache:
    """A radix tree over full pages of token ids; it holds one reference of its own for each page in it.

    Only full pages enter, and a sequence writes only behind what it has computed: so a shared page is never written,
    and two sequences never write one page.
    """

    def __init__(self, pool: BlockPool, page_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool
        self._page_size = page_size
        self._root = _Node(0, (), None)
        self._num_pages = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, _Node]] = []
        """A heap by (last used, serial); an entry may be out of date, and then it is corrected when it surfaces."""
        self._serial = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, with a reference on each for the caller.

        Never the whole of `tokens`: at least one is left to compute, since only a computed token gives the next one.
        """
        if not self.enabled:
            return []
        self._clock += 1
        pages: list[int] = []
        node = self._root
        for key in self._keys(tokens, len(tokens) - 1):
            child = node.children.get(key)
            if child is None:
                break
            child.last_used = self._clock
            pages.append(child.page)
            node = child
        self._pool.share(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the full pages of `tokens`, which must be computed and never be written again.

        The cache takes its own reference on each page that it keeps. Where it has a page with these tokens already, it
        keeps that one; the caller's page stays the caller's and is free when the caller gives it back.
        """
        if not self.enabled:
            return
        self._clock += 1
        node = self._root
        for key, page in zip(self._keys(tokens, len(tokens)), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = _Node(page, key, node)
                node.children[key] = child
                self._pool.share((page,))
                self._num_pages += 1
            child.last_used = self._clock
            node = child
        if node is not self._root:
            self._queue(node)

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first, and say how many; what a sequence holds stays."""
        freed = 0
        in_use: list[_Node] = []
        while freed < count and self._leaves:
            stamp, _, node = heappop(self._leaves)
            node.is_queued = False
            if node.children:
                continue
            if node.last_used != stamp:
                self._queue(node)
            elif self._pool.references(node.page) > 1:
                in_use.append(node)
            else:
                self._remove(node)
                freed += 1
        # They are in use now, which also keeps the next call from meeting them first.
        for node in in_use:
            node.last_used = self._clock
            self._queue(node)
        return freed

    def clear(self) -> None:
        """Forget every prefix, as after a change of the weights; a sequence that holds a page keeps it."""
        self._pool.give_back(self.pages())
        self._root.children.clear()
        self._leaves.clear()
        self._num_pages = 0

    def pages(self) -> list[int]:
        """Every page in the tree."""
        found: list[int] = []
        open_nodes = [self._root]
        while open_nodes:
            children = open_nodes.pop().children.values()
            found += [child.page for child in children]
            open_nodes += children
        return found

    def _keys(self, tokens: Sequence[int], stop: int) -> Iterator[_Tokens]:
        """The tokens of each page that ends at or before `stop`."""
        size = self._page_size
        for start in range(0, stop - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _queue(self, node: _Node) -> None:
        if node.is_queued or node.children:
            return
        node.is_queued = True
        self._serial += 1
        heappush(self._leaves, (node.last_used, self._serial, node))

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None, "the root has no page"
        del parent.children[node.tokens]
        self._num_pages -= 1
        self._pool.give_back((node.page,))
        if parent is not self._root:
            self._queue(parent)
