"""Reservations: the pages that a sequence holds, taken from the pool or from the least recently used prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from phonograph.engine.cache.block_pool import BlockPool
from phonograph.engine.cache.prefix_cache import PrefixCache
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.errors import PhonographError
from phonograph.sizes import ceil_div


class Reservations:
    """Allocates pages for sequences ahead of need, and releases them; the scheduler decides whom to preempt."""

    def __init__(self, limits: Limits, *, prefix_cache: bool) -> None:
        self.pool = BlockPool(limits.num_pages)
        self.prefixes = PrefixCache(self.pool, limits.page_size, enabled=prefix_cache)
        self._page_size = limits.page_size
        self._reserve = limits.reserve_tokens
        self._per_step = limits.tokens_per_row

    @property
    def num_used(self) -> int:
        """Pages that sequences hold; scans every page, for metrics only.

        A page that is not cached has one holder, its sequence: sharing goes through the prefix cache. So the other
        pages with one holder are the cache's alone.
        """
        uncached = self.pool.num_held - self.prefixes.num_pages
        return self.pool.num_held - max(0, self.pool.num_held_once - uncached)

    def admit(self, sequence: Sequence) -> bool:
        """Give pages for all known tokens and the reserve, cached ones first; False, and nothing given, if short."""
        tokens = sequence.known()
        cached = self.prefixes.match(tokens[: sequence.num_shareable])
        missing = self._target(sequence, len(tokens)) - len(cached)
        self._evict_for(missing)
        fresh = self.pool.take(missing)
        if fresh is None:
            self.pool.give_back(cached)
            return False
        sequence.pages = cached + fresh
        sequence.capacity = len(sequence.pages) * self._page_size
        sequence.num_computed = len(cached) * self._page_size
        sequence.num_launched_outputs = len(sequence.outputs)
        sequence.prefill_end = len(tokens)
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Give pages for the next step and the reserve, or what there is; False if the next step has no room."""
        missing = self._target(sequence, sequence.num_computed + self._per_step) - len(sequence.pages)
        if missing > 0:
            self._evict_for(missing)
            fresh = self.pool.take(min(missing, self.pool.num_free))
            sequence.pages += fresh or ()
            sequence.capacity = len(sequence.pages) * self._page_size
        return sequence.has_room(self._per_step)

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others share the full pages of the first `num_tokens`, which committed steps have written.

        Not past the last known token: after it are positions of steps that were launched ahead for nothing.
        """
        self.prefixes.insert(sequence.known()[:num_tokens], sequence.pages)

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Release all pages; none of its steps may be in flight. Full pages stay cached, unless it failed or was
        embedded: embedding many texts would evict the prompts that others share."""
        if keep and sequence.finish is not FinishReason.ERROR and sequence.request.pooling is None:
            # Tokens that a step computed past the sequence's last one were not written to its pages.
            self.keep(sequence, min(sequence.num_computed, sequence.max_computed))
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        sequence.capacity = sequence.num_tabled = sequence.num_computed = sequence.prefill_end = 0
        sequence.num_launched_outputs = len(sequence.outputs)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raise if a reference is not one of these sequences' or the prefix cache's; changes nothing."""
        self.pool.check()
        expected = Counter(page for sequence in holders for page in sequence.pages)
        expected.update(self.prefixes.pages())
        wrong = {
            page: f"{self.pool.references(page)} references, {expected[page]} holders"
            for page in range(1, self.pool.num_pages)
            if self.pool.references(page) != expected[page]
        }
        if wrong:
            raise PhonographError(f"integrity of the KV cache: pages that were lost or freed too early: {wrong}.")

    def _target(self, sequence: Sequence, length: int) -> int:
        """Pages that hold `length` tokens and the reserve, but never more than the sequence can need."""
        return ceil_div(min(length + self._reserve, sequence.max_computed), self._page_size)

    def _evict_for(self, count: int) -> None:
        short = count - self.pool.num_free
        if short > 0:
            self.prefixes.evict(short)
