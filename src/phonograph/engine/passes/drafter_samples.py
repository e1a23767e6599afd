"""Drafter samples: what a drafter is called with before the first request, of a few rows, as rounds and prompts do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted
from phonograph.engine.passes.sample_batches import Trials

_ROWS = 2


class DrafterSamples:
    """Arguments for the calls of a drafter: random tokens and states in rows for trials, and a row of padding."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        caches = (parts.cache, *parts.beside.values())
        self.trials = Trials(parts.tables, caches, parts.limits, parts.model.config.vocab, most=_ROWS)
        self.width = parts.limits.tokens_per_row
        self._device = parts.tables.length.device
        self._numbers = torch.Generator().manual_seed(0)

    def running(self) -> AbstractContextManager[Any]:
        """Inside, the rows hold sequences; afterwards what they held."""
        return self.trials.running(None)

    def taps(self, count: int) -> tuple[torch.Tensor, ...]:
        """Tapped states of the tokens of a round."""
        # The residual stream of a float16 model is in float32, since its values may be beyond float16's.
        dtype = torch.float32 if self._parts.model.dtype == torch.float16 else self._parts.model.dtype
        return tuple(self._states(self.width, dtype) for _ in range(count))

    def prompt(self, states: torch.dtype) -> Mapping[str, Any]:
        """The arguments of `read`: part of a prompt, and padding after it."""
        first = self._parts.limits.page_size if self.trials.num_rows else 0
        rows = torch.full((self.width + 1,), min(1, self.trials.num_rows))
        places = torch.arange(first, first + self.width + 1).clamp_max(self._parts.limits.num_positions - 1)
        rows[-1] = places[-1] = 0
        following = self._tokens(self.width + 1)
        following[-2:] = -1  # what comes after the last one is not known yet
        queries = Queries(self._there(rows), self._there(places), self._table, tokens_per_row=None)
        return {
            "following": self._there(following),
            "features": self._states(self.width + 1, states),
            "queries": queries,
        }

    def accepted(self, places: int, states: torch.dtype | None) -> Accepted:
        """Of each row as many new tokens as there are places, if it is so long; with states, where they are read."""
        rows = torch.zeros(_ROWS + 1, dtype=torch.int64)
        rows[: self.trials.num_rows] = torch.arange(1, self.trials.num_rows + 1)
        rows = self._there(rows)
        lengths, is_real = self._parts.tables.length[rows], (rows > 0).long()
        counts = lengths.clamp(0, places) * is_real
        tokens = self._there(self._tokens(len(rows), places)) * is_real[:, None]
        features = None if states is None else self._states(len(rows) * places, states)
        return Accepted(rows, (lengths - counts) * is_real, tokens, counts, self._table, features)

    @property
    def _table(self) -> torch.Tensor:
        return self._parts.tables.pages[:, : self.trials.width]

    def _tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, self._parts.model.config.vocab, shape, generator=self._numbers)

    def _states(self, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        drawn = torch.randn(num_tokens, self._parts.model.config.hidden, generator=self._numbers)
        return drawn.to(self._device, dtype)

    def _there(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._device)
