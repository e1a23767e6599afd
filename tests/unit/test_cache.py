"""Pages of the KV cache: who holds them, and which prefixes they keep."""

from __future__ import annotations

import pytest

from phonograph.engine.cache.block_pool import BlockPool
from phonograph.engine.cache.prefix_cache import PrefixCache
from phonograph.errors import PhonographError

# -- the pool -------------------------------------------------------------------------------------------------


def taken(pool: BlockPool, count: int) -> list[int]:
    pages = pool.take(count)
    assert pages is not None
    return pages


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    pool = BlockPool(6)
    assert sorted(taken(pool, 5)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_held) == (0, 5)


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert pool.take(0) == []


def test_a_page_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(4)
    pages = taken(pool, 2)
    pool.share(pages)
    pool.give_back(pages)
    assert (pool.num_free, pool.references(pages[0])) == (1, 1)
    pool.give_back(pages)
    assert (pool.num_free, pool.num_held) == (3, 0)
    pool.check()


def test_giving_back_twice_is_an_error() -> None:
    pool = BlockPool(4)
    pages = taken(pool, 1)
    pool.give_back(pages)
    with pytest.raises(PhonographError, match="released twice"):
        pool.give_back(pages)
    pool.check()


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(PhonographError, match="it has no reference"):
        BlockPool(4).share([2])


# -- the prefix cache -----------------------------------------------------------------------------------------


class Cached:
    """A pool, a prefix cache with pages of two tokens, and what is held in it."""

    def __init__(self, num_pages: int = 12) -> None:
        self.pool = BlockPool(num_pages)
        self.cache = PrefixCache(self.pool, 2)

    def compute(self, *tokens: int) -> list[int]:
        """As a sequence that computes these tokens, inserts them and ends."""
        pages = taken(self.pool, -(-len(tokens) // 2))
        self.cache.insert(tokens, pages)
        self.pool.give_back(pages)
        return pages

    def found(self, *tokens: int) -> list[int]:
        """As a sequence that looks for its prefix and ends."""
        pages = self.cache.match(tokens)
        self.pool.give_back(pages)
        return pages


def test_the_longest_prefix_in_full_pages_is_found() -> None:
    cached = Cached()
    pages = cached.compute(1, 2, 3, 4, 5)
    assert cached.cache.num_pages == 2, "the third page isn't full"
    assert cached.found(1, 2, 3, 4, 9) == pages[:2]
    assert cached.found(1, 2, 3, 9, 9) == pages[:1]
    assert cached.found(9, 2, 3, 4, 5) == []


def test_at_least_one_token_is_left_to_compute() -> None:
    cached = Cached()
    pages = cached.compute(1, 2, 3, 4)
    assert cached.found(1, 2, 3, 4) == pages[:1]
    assert cached.found(1, 2) == []
    assert cached.found() == []


def test_the_same_page_after_another_prefix_is_another_page() -> None:
    cached = Cached()
    cached.compute(1, 2, 3, 4)
    other = cached.compute(5, 6, 3, 4)
    assert cached.found(5, 6, 3, 4, 0) == other


def test_a_match_holds_its_pages() -> None:
    cached = Cached()
    pages = cached.compute(1, 2, 3, 4)
    assert cached.cache.match((1, 2, 0)) == pages[:1]
    assert cached.pool.references(pages[0]) == 2
    assert cached.cache.evict(9) == 1, "only the page behind it goes"
    assert cached.cache.pages() == pages[:1]


def test_what_is_known_already_is_kept_once() -> None:
    cached = Cached()
    first = cached.compute(1, 2, 3, 4)
    second = taken(cached.pool, 3)
    cached.cache.insert((1, 2, 3, 4, 5, 6), second)
    cached.pool.give_back(second)
    assert cached.found(1, 2, 3, 4, 5, 6, 7) == [*first, second[2]]
    assert cached.pool.num_held == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    cached = Cached()
    shared = cached.compute(1, 2)
    older = cached.compute(1, 2, 3, 3)
    newer = cached.compute(1, 2, 4, 4)
    cached.found(1, 2, 3, 3, 0)
    assert cached.cache.evict(1) == 1
    assert set(cached.cache.pages()) == {shared[0], older[1]}, "the younger one had not been used since"
    assert newer[1] not in cached.cache.pages()
    assert cached.cache.evict(9) == 2
    assert cached.pool.num_held == 0


def test_a_parent_goes_after_its_children() -> None:
    cached = Cached()
    pages = cached.compute(1, 2, 3, 4, 5, 6)
    for left in (2, 1, 0):
        assert cached.cache.evict(1) == 1
        assert cached.cache.pages() == pages[:left]


def test_what_could_not_go_can_once_it_is_given_back() -> None:
    cached = Cached()
    cached.compute(1, 2, 3, 4)
    held = cached.cache.match((1, 2, 3, 4, 5))
    assert cached.cache.evict(1) == 0
    assert cached.cache.evict(1) == 0
    cached.pool.give_back(held)
    assert cached.cache.evict(5) == 2


def test_clear_forgets_everything_but_takes_nothing_from_a_sequence() -> None:
    cached = Cached()
    cached.compute(1, 2, 3, 4)
    held = cached.cache.match((1, 2, 3, 4, 5))
    cached.cache.clear()
    assert cached.found(1, 2, 3) == []
    assert [cached.pool.references(page) for page in held] == [1, 1]
    cached.pool.give_back(held)
    cached.compute(1, 2)
    assert cached.cache.evict(5) == 1
    assert cached.pool.num_held == 0


def test_a_disabled_cache_keeps_and_finds_nothing() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2, enabled=False)
    pages = taken(pool, 1)
    cache.insert((1, 2), pages)
    assert cache.match((1, 2, 3)) == []
    assert (cache.num_pages, cache.evict(1)) == (0, 0)
    assert pool.references(pages[0]) == 1
