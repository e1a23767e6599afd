"""Counts: where the scheduler stands, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


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
