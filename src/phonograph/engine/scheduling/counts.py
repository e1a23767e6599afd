"""Counts: where the scheduler stands, for metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phonograph.engine.cache.reservations import Reservations
from phonograph.engine.requests.sequence import Sequence, State


@dataclass(kw_only=True)
class Totals:
    """What the scheduler counts as it goes."""

    prompt_tokens: int = 0
    """Of requests that were admitted, cached or not; n > 1 counts them once."""
    prefill_tokens: int = 0
    """Tokens that prefills computed; after a preemption they are computed, and counted, again."""
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_lookup_tokens: int = 0
    """Tokens that were looked for in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Tokens that were not computed, since their pages were cached."""


@dataclass(kw_only=True)
class Counts(Totals):
    """Sequences, pages and tokens so far."""

    waiting: int
    running: int
    free_pages: int
    cached_pages: int
    """Held by the prefix cache, and perhaps by sequences too."""
    used_pages: int
    """Held by sequences; every other page is free, or cached and can be evicted."""
    steps: int
    """Steps launched."""

    @staticmethod
    def of(live: Iterable[Sequence], pages: Reservations, steps: int, totals: Totals) -> Counts:
        """As they are now, for these sequences that are being served."""
        states = [sequence.state for sequence in live]
        return Counts(
            waiting=states.count(State.WAITING),
            running=states.count(State.RUNNING),
            free_pages=pages.pool.num_free,
            cached_pages=pages.prefixes.num_pages,
            used_pages=pages.num_used,
            steps=steps,
            **vars(totals),
        )
