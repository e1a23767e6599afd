"""Counts: where the scheduler stands, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
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
    prompt_tokens: int
    """Of requests that were admitted, cached or not; n > 1 counts them once."""
    prefill_tokens: int
    """Tokens that prefills computed; after a preemption they are computed, and counted, again."""
    generated_tokens: int
    preemptions: int
    prefix_lookup_tokens: int
    """Tokens that were looked for in the prefix cache."""
    prefix_hit_tokens: int
    """Tokens that were not computed, since their pages were cached."""
