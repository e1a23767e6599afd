"""Properties of the block pool and the prefix cache, against models that are too simple to be wrong."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.engine.cache.block_pool import BlockPool
from phonograph.engine.cache.prefix_cache import PrefixCache


@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from(["take", "share", "give back"]), st.integers(0, 5))))
def test_free_and_held_pages_are_all_pages(num_pages: int, actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_pages)
    held: list[list[int]] = []
    for action, number in actions:
        if action == "take":
            free = pool.num_free
            pages = pool.take(number)
            assert (pages is None) == (number > free)
            held += [pages] if pages else []
        elif held and action == "share":
            pool.share(held[number % len(held)])
            held.append(held[number % len(held)])
        elif held:
            pool.give_back(held.pop(number % len(held)))
        references = Counter(page for pages in held for page in pages)
        assert all(pool.references(page) == references[page] for page in range(num_pages))
        assert pool.num_free + pool.num_held == num_pages - 1
        assert pool.num_held == len(references)
        assert 0 not in references
        pool.check()
    for pages in held:
        pool.give_back(pages)
    assert pool.num_free == num_pages - 1


TOKENS = st.lists(st.integers(0, 1), max_size=9).map(tuple)
ACTIONS = st.lists(
    st.tuples(st.just("start"), TOKENS)
    | st.tuples(st.just("end"), st.integers(0, 9))
    | st.tuples(st.just("evict"), st.integers(0, 4)),
    max_size=40,
)


class Model:
    """Knows the tokens in every page, and what each sequence holds."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = BlockPool(40)
        self.cache = PrefixCache(self.pool, page_size)
        self.written: dict[int, tuple[int, ...]] = {}
        self.sequences: list[tuple[tuple[int, ...], list[int]]] = []

    def start(self, tokens: tuple[int, ...]) -> None:
        """Match, take the rest of the pages, and write them."""
        cached = self.cache.match(tokens)
        assert len(cached) * self.page_size < max(len(tokens), 1)
        for index, page in enumerate(cached):
            assert self.written[page] == tokens[: (index + 1) * self.page_size]
        missing = -(-len(tokens) // self.page_size) - len(cached)
        self.cache.evict(missing - self.pool.num_free)
        fresh = self.pool.take(missing)
        if fresh is None:
            self.pool.give_back(cached)
            return
        pages = cached + fresh
        for index, page in enumerate(fresh, len(cached)):
            self.written[page] = tokens[: (index + 1) * self.page_size]
        self.sequences.append((tokens, pages))

    def end(self, number: int) -> None:
        """Insert what was computed, then the longest prefix is found again; give everything back."""
        if not self.sequences:
            return
        tokens, pages = self.sequences.pop(number % len(self.sequences))
        self.cache.insert(tokens, pages)
        again = self.cache.match((*tokens, 7))
        assert len(again) == len(tokens) // self.page_size
        self.pool.give_back(again)
        self.pool.give_back(pages)

    def evict(self, count: int) -> None:
        held = {page for _, pages in self.sequences for page in pages}
        cached = set(self.cache.pages())
        freed = self.cache.evict(count)
        gone = cached - set(self.cache.pages())
        assert freed == len(gone) <= count
        assert not gone & held
        assert freed == min(count, len(cached - held)), "a page that only the cache holds has no child that is held"

    def check(self) -> None:
        references = Counter(page for _, pages in self.sequences for page in pages)
        references.update(self.cache.pages())
        assert all(self.pool.references(page) == references[page] for page in range(40))
        self.pool.check()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), ACTIONS)
def test_a_prefix_holds_the_tokens_that_were_asked_for(page_size: int, actions: list[tuple[str, object]]) -> None:
    model = Model(page_size)
    for action, value in actions:
        getattr(model, action)(value)
        model.check()
    while model.sequences:
        model.end(0)
    model.cache.evict(40)
    assert model.pool.num_held == 0
