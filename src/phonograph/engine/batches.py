"""The batches that runners serve, made from what the scheduler planned."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np

from phonograph.engine.attention.base import Span
from phonograph.engine.limits import Limits
from phonograph.engine.sampler import Sampling, level_of
from phonograph.engine.sequence import Sequence
from phonograph.engine.step import Step


@dataclass(frozen=True)
class Wants:
    """What the requests of a batch want of the sampler, taken together."""

    level: Sampling = Sampling.GREEDY
    logprobs: bool = False
    constrained: bool = False
    """Somebody follows a grammar."""

    @property
    def is_detailed(self) -> bool:
        """Whether it needs tables as wide as the vocabulary, or tells more than tokens."""
        return self.logprobs or self.constrained or self.level is Sampling.PENALISED


@dataclass(frozen=True)
class DecodeBatch:
    """One token for each of these rows; everything else is in the tables."""

    rows: Any
    width: int
    """Pages that the longest sequence has; a recording looks at all that a row can have."""
    wants: Wants


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt chunks and, among them, rows that decode: their token comes from the tables."""

    tokens: Any
    rows: Any
    positions: Any
    decoding: Any
    ends: Any
    """Index of the last token of every sequence that samples."""
    width: int
    wants: Wants
    spans: tuple[Span, ...] | None


def wants_of(sequences: Many[Sequence]) -> Wants:
    """What these sequences want together: the highest level, and logprobs if one asks."""
    level, logprobs, constrained = Sampling.GREEDY, False, False
    for sequence in sequences:
        params = sequence.request.params
        level = max(level, level_of(params))
        logprobs |= params.logprobs is not None
        constrained |= sequence.constraint is not None
    return Wants(level, logprobs, constrained)


class BatchBuilder:
    """Makes batches; while the same sequences decode, step after step, nothing is derived anew but the width."""

    def __init__(self, limits: Limits) -> None:
        self._page_size = limits.page_size
        self._decodes: tuple[Sequence, ...] | None = None
        self._rows = np.zeros(0, dtype=np.int64)
        self._wants = Wants()
        self._longest = 0

    def is_steady(self, step: Step) -> bool:
        """Whether this step decodes just the sequences that the last decode batch was made for."""
        return step.decodes is self._decodes and not step.prefills and not self._wants.constrained

    def decode(self, step: Step) -> DecodeBatch:
        """The batch of a step without prefills."""
        if step.decodes is not self._decodes:
            self._decodes = step.decodes
            self._rows = np.fromiter((s.row for s in step.decodes), dtype=np.int64, count=len(step.decodes))
            self._wants = wants_of(step.decodes)
        self._longest = max(s.num_computed for s in step.decodes)
        return DecodeBatch(self._rows, self._width(self._longest), self._wants)

    def prefill(self, step: Step) -> PrefillBatch:
        """The batch of a step with prefills, decodes first."""
        num_decodes = len(step.decodes)
        spans = [Span(s.row, index, s.num_computed - 1, 1) for index, s in enumerate(step.decodes)]
        ends = list(range(num_decodes))
        known = [0] * num_decodes  # their tokens are in the tables
        for chunk in step.prefills:
            spans.append(Span(chunk.sequence.row, len(known), chunk.start, chunk.count))
            known += chunk.tokens
            if chunk.samples:
                ends.append(len(known) - 1)
        decoding = np.zeros(len(known), dtype=bool)
        decoding[:num_decodes] = True
        rows, positions = rows_and_positions(spans)
        return PrefillBatch(
            np.asarray(known, dtype=np.int64),
            rows,
            positions,
            decoding,
            np.asarray(ends, dtype=np.int64),
            self._width(max(span.start + span.count for span in spans)),
            wants_of(step.sampling),
            tuple(spans),
        )

    def _width(self, length: int) -> int:
        return max(1, -(-length // self._page_size))


def rows_and_positions(spans: Many[Span]) -> tuple[Any, Any]:
    """The row and the position of every token of these spans, one after the other."""
    counts = np.asarray([span.count for span in spans], dtype=np.int64)
    rows = np.repeat(np.asarray([span.row for span in spans], dtype=np.int64), counts)
    firsts = np.cumsum(counts) - counts
    starts = np.asarray([span.start for span in spans], dtype=np.int64)
    return rows, np.arange(len(rows), dtype=np.int64) + np.repeat(starts - firsts, counts)
