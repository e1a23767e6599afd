"""Sample batches: sequences of random numbers in some rows of the tables, so that trial runs attend over real pages.

Whatever was in these rows and pages comes back afterwards: a check may run between two steps of a busy engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.requests.limits import Limits
from phonograph.engine.state.column import TrialRows
from phonograph.engine.state.tables import RequestTables
from phonograph.sizes import ceil_div

_MAX_ROWS = 32
"""Pages are copied and put back around every trial: few enough to cost little memory."""


class Trials:
    """The state that sample batches run on.

    A row has the page 1, which all rows read, and pages of its own with room for all that a step writes: its tokens,
    and what a drafter writes after them. Where the cache is too small for that, and for whatever a large bucket holds
    besides, samples point at the null row.
    """

    def __init__(
        self, tables: RequestTables, caches: Sequence[CacheGroup], limits: Limits, vocab: int, most: int = _MAX_ROWS
    ) -> None:
        """With no more rows than `most`."""
        self._tables = tables
        self._parts = [part for cache in caches for part in cache.tensors]
        self._size = limits.page_size
        self._vocab = vocab
        written = 2 * limits.tokens_per_row - 1
        self._num_own = own = ceil_div(written, limits.page_size)
        self.last_start = (1 + own) * limits.page_size - written
        """The last position at which a row's step may begin; the first one is that after the shared page."""
        fits = limits.max_len >= (1 + own) * limits.page_size
        self.num_rows = max(0, min(most, limits.max_seqs, (limits.num_pages - 2) // own)) if fits else 0
        self.width = -(-limits.num_positions // limits.page_size)
        """Pages that a sequence may have."""
        self.num_pages = self.num_rows * own + 2
        """The pages that rows have, with the shared one and the null page: the first ones."""

    @contextmanager
    def running(self, batch: Any) -> Iterator[Mapping[str, torch.Tensor]]:
        """Put random sequences into the rows; afterwards they hold what they held.

        Yields what live rows may read of that: all but the null page and the null row. Each layer is a state of its
        own: what is right in the others hides nothing.
        """
        pages = [part[:, : self.num_pages] for part in self._parts]
        held = [tensor.clone() for tensor in pages]
        with self._tables.kept(self.num_rows):
            self._fill(pages)
            try:
                yield self._live(pages)
            finally:
                for tensor, before in zip(pages, held, strict=True):
                    tensor.copy_(before)

    def _live(self, pages: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        layers = [(number, at, layer) for number, part in enumerate(pages) for at, layer in enumerate(part.unbind())]
        live = {f"KV cache {number}[{at}]": layer[1:] for number, at, layer in layers}
        return live | {f"column {name}": rows for name, rows in self._tables.live_rows(self.num_rows).items()}

    def _fill(self, pages: Sequence[torch.Tensor]) -> None:
        noises, values = self._random
        for part, noise in zip(pages, noises, strict=True):
            # One random page, shifted by layer and page: as good a check, and a fraction of the work.
            shifts = torch.arange(part.shape[0] * part.shape[1], device=part.device).view(part.shape[:2]) % 7 + 1
            part.copy_(noise * shifts[..., None, None, None].to(part.dtype) / 4)
        for rows, value in values:
            rows.copy_(value)

    @cached_property
    def _random(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """(a page of each tensor of the cache; rows of the tables, and what they hold): brought over once, since a copy
        from the host would wait for the trial before."""
        numbers = torch.Generator().manual_seed(self.num_rows)

        def page(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(like.shape[2:], generator=numbers, dtype=torch.float32).to(like.device, like.dtype)

        noises = [page(part) for part in self._parts]
        if not self.num_rows:
            return noises, []
        trial = TrialRows(self.num_rows, self._vocab, self._size, self._num_own, self.last_start, numbers)
        return noises, self._tables.trial_values(trial)
