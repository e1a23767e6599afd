"""prefill: chunks of prompts and, among them, rows that decode."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phonograph.engine.attention.base import Queries, Span
from phonograph.engine.attention.gaps import GapAttention
from phonograph.engine.limits import Limits
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.registry import PREFILL
from phonograph.engine.passes.sampling_tail import SamplingNeeds, needs_of
from phonograph.engine.readback import Picked
from phonograph.engine.step import Step
from phonograph.graphs.context import Stage, current
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.slots import Pad, Slot


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt chunks and, before them, rows that decode: their token comes from the tables."""

    tokens: Any
    rows: Any
    positions: Any
    decoding: Any
    ends: Any
    """Index of the last token of every sequence that samples."""
    width: int
    needs: SamplingNeeds
    spans: tuple[Span, ...] | None


class PrefillBatches:
    """Makes the batches of steps with prefills, decodes first."""

    def __init__(self, limits: Limits) -> None:
        self._page_size = limits.page_size

    def batch(self, step: Step) -> PrefillBatch:
        """Rows, tokens and positions as far as the host knows them."""
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
        rows, positions = _rows_and_positions(spans)
        longest = max(span.start + span.count for span in spans)
        return PrefillBatch(
            np.asarray(known, dtype=np.int64),
            rows,
            positions,
            decoding,
            np.asarray(ends, dtype=np.int64),
            -(-longest // self._page_size),
            needs_of(step.sampling),
            tuple(spans),
        )


class PrefillBody:
    """Runs the model over chunks and decodes; the tail picks their tokens."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        self._model = parts.model.with_attention(GapAttention(parts.model.attention))

    def __call__(self, batch: PrefillBatch) -> torch.Tensor:
        """Hidden states of the tokens that something is sampled after."""
        tables, rows = self._parts.tables, batch.rows
        tokens = torch.where(batch.decoding, tables.last_token[rows], batch.tokens)
        # A recording may not look at the host's spans; an eager pass is faster with them.
        spans = batch.spans if current().stage is Stage.EAGER else None
        queries = Queries(rows, batch.positions, tables.pages[:, : batch.width], None, spans)
        return self._model.hidden(tokens, queries, self._parts.cache, wanted=batch.ends).states

    def tail(self, hidden: torch.Tensor, batch: PrefillBatch) -> Picked:
        """Logits and tokens, of as many sequences as there are."""
        ends = batch.ends
        queries = Queries(batch.rows[ends], batch.positions[ends], self._parts.tables.pages, tokens_per_row=1)
        # A graph whose places for them never change in number puts out all of them.
        logits = self._model.logits(hidden[: ends.shape[0]])
        return self._parts.tail.next_tokens(logits, queries, batch.needs)


class PrefillSample:
    """Chunks of random length, decodes among them, as far as there are rows for trials; the rest is padding."""

    def __init__(self, parts: PassParts, *, spans: bool) -> None:
        self._trials = parts.trials
        self._page_size = parts.limits.page_size
        self._vocab = parts.model.config.vocab
        self._spans = spans
        """Whether samples tell their spans, as gaps between graphs want to know them."""

    def __call__(self, extent: Extent, seed: int) -> PrefillBatch:
        numbers = np.random.default_rng(seed)
        left, spans = extent.used["tokens"], list[Span]()
        for row in range(1, self._trials.num_rows + 1):
            count = min(left, int(numbers.integers(1, self._page_size + 1)))
            if count == 0:
                break
            spans.append(Span(row, extent.used["tokens"] - left, self._page_size, count))
            left -= count
        rows, positions = np.zeros((2, extent.used["tokens"]), dtype=np.int64)
        known = extent.used["tokens"] - left
        if spans:
            rows[:known], positions[:known] = _rows_and_positions(spans)
        ends = np.zeros(extent.used["sampled"], dtype=np.int64)
        lasts = [span.first + span.count - 1 for span in spans][: len(ends)]
        ends[: len(lasts)] = lasts
        tokens = numbers.integers(0, self._vocab, size=len(rows))
        tokens[known:] = 0  # all padding writes the same to the null page, in whatever order
        told = tuple(spans) if self._spans else None
        decoding = np.zeros(len(rows), dtype=bool)
        decoding[[span.first for span in spans if span.count == 1]] = True
        return PrefillBatch(tokens, rows, positions, decoding, ends, self._trials.width, SamplingNeeds(), told)


def prefill_pass(parts: PassParts, backend: str) -> Pass:
    """The pass over all tokens of a step."""
    limits, body = parts.limits, PrefillBody(parts)
    return Pass(
        PREFILL,
        tokens_per_row=None,
        bucketed="tokens",
        slots=[
            Slot("tokens", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, parts.model.config.vocab - 1)),
            Slot("rows", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_seqs)),
            Slot("positions", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.num_positions - 1)),
            Slot("decoding", ("tokens",), torch.bool, pad=Pad.fill(False)),
            Slot("ends", ("sampled",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_tokens - 1)),
        ],
        dims=[Dim("sampled", limit=limits.max_seqs * limits.tokens_per_row)],
        batch=PrefillBatches(limits).batch,
        body=body,
        tail=body.tail,
        sample=PrefillSample(parts, spans=backend == "breakable"),
        preserve=parts.trials.running,
    )


def _rows_and_positions(spans: Many[Span]) -> tuple[Any, Any]:
    """The row and the position of every token of these spans, one after the other."""
    counts = np.asarray([span.count for span in spans], dtype=np.int64)
    rows = np.repeat(np.asarray([span.row for span in spans], dtype=np.int64), counts)
    firsts = np.cumsum(counts) - counts
    starts = np.asarray([span.start for span in spans], dtype=np.int64)
    return rows, np.arange(len(rows), dtype=np.int64) + np.repeat(starts - firsts, counts)
